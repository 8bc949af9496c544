// One chart. Its keys in the address: row (of a part with several), x, y, logx, logy, band, pareto, off (lines that are
// switched off, by number) and at (a place on the x axis whose values are shown). The second section's keys are 2.x, …;
// those of charts of marks, with one value per line, m.y, m2.y, … The keys of hours are in hours.js.

const NAMES = { round: "Rounds", up: "Uplink", total: "All bytes", seconds: "Seconds", hours: "Hours", memory: "Memory" };

class Chart {
  constructor(figure, prefix) {
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.prefix = prefix;
    this.figure = figure;
    this.marks = figure.classList.contains("marks");
    this.hover = null;
    this.plot = html("div", { class: "plot" });
    this.keys = html("ul", { class: "keys", "aria-label": "Lines" });
    this.data.series.forEach((series, number) => this.keys.append(html("li", {}, this.key(series, number))));
    this.missing = html("p", { class: "hint missing" });
    this.hours = "hours" in this.data.axes ? new Hours(this) : null;
    this.hint = html("p", { class: "hint", id: `hint${prefix}` }, this.hints());
    figure.append(this.controls(), ...(this.hours ? [this.hours.box] : []), this.plot, this.missing, this.keys, downloads(this), this.hint);
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.draw();
  }

  hints() {
    const several = this.data.series.some((s) => s.seeds > 1);
    const [line, band] = this.marks ? ["Marks", "whiskers"] : ["Lines", "bands"];
    const seeds = several ? `${line} are means over seeds, ${band} go from the lowest to the highest seed. ` : "";
    const about = this.data.about ? `${this.data.about} ` : "";
    return `${about}${seeds}Point at the chart, or focus it and use the arrow keys, to read values; click to pin them.`;
  }

  get state() {
    const found = view();
    const get = (key) => found.get(this.prefix + key);
    const { axes, metrics, start } = this.data;
    const x = get("x") in axes ? get("x") : start.x;
    const y = get("y") in metrics ? get("y") : start.y;
    const flag = (key, usual) => (get(key) === null ? usual : get(key) === "1");
    const row = Number(get("row")) in (this.data.rows ?? []) ? Number(get("row")) : 0;
    const off = (get("off") ?? "").split(".").filter(Boolean).map(Number);
    const number = (key) => (get(key) === null || Number.isNaN(Number(get(key))) ? null : Number(get(key)));
    return {
      row, x, y, off: new Set(off), logx: flag("logx", axes[x].log), logy: flag("logy", metrics[y].log),
      band: flag("band", true), pareto: flag("pareto", false), at: number("at"),
      link: number("link"), step: number("step"), target: number("target"),
    };
  }

  change(changes) {
    setView(Object.fromEntries(Object.entries(changes).map(([key, value]) => [this.prefix + key, value])));
  }

  controls() {
    const { axes, metrics } = this.data;
    const choice = (key, title, names, reset) => {
      const box = html("div", { class: "choices" });
      for (const [value, name] of names) {
        const input = html("input", { type: "radio", name: `${key}-${this.prefix}`, value });
        input.addEventListener("change", () => this.change({ [key]: value, [reset]: null, at: null }));
        box.append(html("label", {}, input, name));
      }
      return html("fieldset", { "data-key": key }, html("legend", {}, title), box);
    };
    const tick = (key, title) => {
      const input = html("input", { type: "checkbox", "data-key": key });
      input.addEventListener("change", () => this.change({ [key]: input.checked }));
      return html("label", {}, input, title);
    };
    const [costs, drawn, rows] = [Object.keys(axes), Object.entries(metrics), this.data.rows ?? []];
    this.bar = html("div", { class: "controls" });
    if (rows.length > 1) this.bar.append(choice("row", "Row", rows.map((name, n) => [n, name]), "off"));
    if (costs.length > 1) this.bar.append(choice("x", "Against", costs.map((k) => [k, NAMES[k]]), "logx"));
    if (drawn.length > 1) this.bar.append(choice("y", "Show", drawn.map(([k, m]) => [k, m.label]), "logy"));
    const several = this.data.series.some((s) => s.seeds > 1) ? [tick("band", "seeds")] : [];
    const front = this.data.series.length > 1 ? [tick("pareto", "Pareto front")] : [];
    this.bar.append(html("div", { class: "ticks" }, tick("logx", "log x"), tick("logy", "log y"), ...several, ...front));
    return this.bar;
  }

  // The rows of the lines that are switched on, as far as the axes can show them.
  lines(state) {
    const lines = [];
    this.data.series.forEach((series, number) => {
      const y = series.y[state.y];
      if (series.row !== state.row || state.off.has(number) || !y) return;
      const rows = [];
      series.x[state.x].forEach((x, n) => {
        const [mean, low, high] = [y.mean[n], (y.low ?? y.mean)[n], (y.high ?? y.mean)[n]];
        if (mean === null || (state.logx && x <= 0) || (state.logy && low <= 0)) return;
        rows.push({ x, mean, low, high, on: series.y.correction?.mean[n], test: series.y.correction_test?.mean[n] });
      });
      if (rows.length) lines.push({ number, series, rows });
    });
    return lines;
  }

  // Whether a line has a tested correction, which is drawn in a strip below the plot.
  tested(state, lines) {
    const there = ({ rows }) => rows.some((r) => typeof r.test === "number");
    return !this.marks && !state.y.startsWith("correction") && lines.some(there);
  }

  // The evaluations that no other run beats for the same cost or less; study/curves.py computes the same for the tables.
  pareto(lines, state) {
    const sign = this.data.metrics[state.y].goal === "max" ? 1 : -1;
    const runs = lines.map(({ number, series }) => {
      const y = series.y[state.y];
      return { number, next: 0, rows: series.x[state.x].slice(0, y.whole).map((x, n) => [x, sign * y.mean[n]]) };
    });
    const worth = (run, x) => {  // on the straight line between two evaluations
      while (run.next < run.rows.length && run.rows[run.next][0] <= x) run.next += 1;
      const [before, after] = [run.rows[run.next - 1], run.rows[run.next]];
      if (!before || (!after && before[0] < x)) return -Infinity;
      return before[0] === x ? before[1] : before[1] + ((x - before[0]) / (after[0] - before[0])) * (after[1] - before[1]);
    };
    const costs = [...new Set(runs.flatMap((run) => run.rows.map(([x]) => x)))].filter((x) => x > 0).sort((a, b) => a - b);
    const stops = [];
    let best = -Infinity;
    for (const x of costs) {
      const values = runs.map((run) => worth(run, x));
      const top = Math.max(...values);
      if (top <= best) continue;
      best = top;
      const run = runs[values.indexOf(top)];
      if (run.rows[run.next - 1][0] === x) stops.push({ number: run.number, x, y: sign * top });
    }
    return stops;
  }

  range(lines, state) {
    const xs = lines.flatMap(({ rows }) => rows.map((r) => r.x));
    const ys = lines.flatMap(({ rows }) => rows.flatMap((r) => (state.band ? [r.low, r.high] : [r.mean])));
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
    if (lines.some(({ series }) => series.gone.length)) {  // a run that diverges would flatten all others
      const first = Math.max(...lines.map(({ rows }) => rows[0].mean));
      y1 = Math.min(y1, Math.max(first * 2, y0 * 1.01));
    }
    if (!state.logx && state.x !== "round" && !this.marks) x0 = Math.min(x0, 0);
    if (x0 === x1) [x0, x1] = state.logx || this.marks ? [x0 / 2, x1 * 2] : [x0 - 1, x1 + 1];
    else if (this.marks) {
      const room = state.logx ? (x1 / x0) ** 0.08 : (x1 - x0) * 0.08;
      [x0, x1] = state.logx ? [x0 / room, x1 * room] : [Math.max(0, x0 - room), x1 + room];
    }
    const pad = state.logy ? (y1 / y0) ** 0.04 || 1 : (y1 - y0) * 0.04;
    [y0, y1] = state.logy ? [y0 / pad, y1 * pad] : [y0 - pad, y1 + pad];
    if (y0 === y1) [y0, y1] = state.logy ? [y0 / 2, y1 * 2] : [y0 - 0.5, y1 + 0.5];
    return { x0, x1, y0, y1 };
  }

  draw() {
    const state = this.state;
    this.show(state);
    this.hours?.fill(state);
    const width = Math.max(260, Math.round(this.plot.clientWidth));
    const height = Math.round(Math.min(460, Math.max(290, width * 0.5)));
    const lines = this.lines(state);
    this.tellMissing(state, lines);
    this.hours?.show(state, lines);
    const whole = height + (this.tested(state, lines) ? STRIP : 0);
    const root = svg("svg", { viewBox: `0 0 ${width} ${whole}`, height: whole, tabindex: 0, role: "group", "aria-describedby": this.hint.id });
    const focused = this.plot.contains(document.activeElement);
    this.lineup = null;
    if (!lines.length) {
      root.append(svg("text", { class: "empty", x: width / 2, y: height / 2, "text-anchor": "middle" }, "Nothing to draw: switch on a line or a linear axis."));
      this.plot.replaceChildren(root);
      return;
    }
    this.lineup = { ...this.layout(state, lines, width, height), root };
    this.fill(root);
    this.reading = html("div", { class: "reading", "aria-live": "polite", hidden: "" });
    this.plot.replaceChildren(root, this.reading);
    if (focused) root.focus({ preventScroll: true });
    listen(this, root);
    read(this);
  }

  layout(state, lines, width, height) {
    const box = this.range(lines, state);
    const yTicks = ticks(box.y0, box.y1, state.logy, Math.round(height / 60));
    const left = 34 + 7 * Math.max(...labelled(yTicks).map((text) => text.length));
    const share = scale(box.x0, box.x1, state.logx, 0, 1);
    const atEdge = (rows) => share(rows[rows.length - 1].x) > 0.96;
    const longest = Math.max(...lines.map(({ series, rows }) => (atEdge(rows) ? textWidth(short(series.name)) : 0)));
    const side = !this.marks && width >= 620 ? 44 + longest : 0;  // room for the names of the lines
    const area = { left, right: width - Math.max(16, side), top: 10, bottom: height - 44 };
    const x = scale(box.x0, box.x1, state.logx, area.left, area.right);
    const y = scale(box.y0, box.y1, state.logy, area.bottom, area.top);
    const stops = state.pareto ? this.pareto(lines, state) : [];
    const strip = this.tested(state, lines) ? { top: height + 20, bottom: height + STRIP - 8 } : null;
    return { data: this.data, state, lines, box, area, x, y, yTicks, stops, width, side, atEdge, strip, marks: this.marks };
  }

  fill(root) {
    const { state, lines, area, stops, x, y } = this.lineup;
    root.setAttribute("aria-label", `${this.data.metrics[state.y].label} against ${this.data.axes[state.x].label}`);
    const clip = svg("rect", { x: area.left - 5, y: area.top - 5, width: area.right - area.left + 10, height: area.bottom - area.top + 8 });
    const inside = svg("g", { "clip-path": `url(#inside${this.prefix})` });
    root.append(...frame(this.lineup), svg("clipPath", { id: `inside${this.prefix}` }, clip), inside);
    inside.append(...stairs(stops, x, y));
    if (this.marks) inside.append(...lines.map((line) => drawMark(line, this.lineup)));
    else for (const draw of [drawLine, drawMarkers]) inside.append(...lines.map((line) => draw(line, this.lineup)));
    root.append(...nameInside(this.lineup), ...nameColumn(this.lineup), ...drawStrip(this.lineup));
  }

  // Lines that are switched on but have no point in this view are named, so that none is lost.
  tellMissing(state, lines) {
    const drawn = new Set(lines.map(({ number }) => number));
    const lost = this.data.series.filter((s, n) => s.row === state.row && !state.off.has(n) && !drawn.has(n));
    const one = (s) => `${s.name} (${s.gone.join("; ") || `no positive value of ${this.data.metrics[state.y].label}`})`;
    this.missing.textContent = lost.length ? `Not in this view: ${lost.map(one).join(", ")}.` : "";
  }

  // Set controls and legend to the state.
  show(state) {
    for (const input of this.bar.querySelectorAll("input")) {
      const key = input.dataset.key ?? input.closest("fieldset").dataset.key;
      input.checked = input.type === "radio" ? input.value === String(state[key]) : state[key];
    }
    [...this.keys.children].forEach((item, number) => {
      item.hidden = this.data.series[number].row !== state.row;
      item.firstChild.setAttribute("aria-pressed", String(!state.off.has(number)));
    });
  }

  key(series, number) {
    const gone = series.gone.length ? { title: series.gone.join("; ") } : {};
    const text = series.name + (series.gone.length ? " ✕" : "");
    const button = html("button", { class: "key", type: "button", ...gone }, sample(series, this.marks), text);
    button.addEventListener("click", () => {
      const off = this.state.off;
      if (!off.delete(number)) off.add(number);
      this.change({ off: off.size ? [...off].sort((a, b) => a - b).join(".") : null });
    });
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => this.lift(number));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => this.lift(null));
    return button;
  }

  lift(number) {
    const groups = [...this.plot.querySelectorAll(".series")];
    const known = groups.some((g) => Number(g.dataset.number) === number);
    this.plot.classList.toggle("dimmed", known);
    for (const one of groups) one.classList.toggle("near", known && Number(one.dataset.number) === number);
  }
}
