"use strict";
// Charts and sortable tables. The state of a chart is in location.hash, so that a view can be linked: every control
// changes the hash, and only the hash decides what is drawn. Keys of the first chart: row (of a part with several), x, y,
// logx, logy, band, pareto, off (lines that are switched off, by number), at (a place on the x axis whose values are
// shown); of the second chart: 2.x, …. Charts of marks, with one value per line, are numbered separately: m.y, m2.y, …
(() => {
  const NAMES = { round: "Rounds", up: "Uplink", total: "All bytes", seconds: "Seconds", memory: "Memory" };
  const DASHES = ["", "7 4", "2 4", "9 3 2 3"];

  const put = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const html = (tag, attributes = {}, ...children) => put(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  // ---- numbers

  const raised = (n) => [...String(n)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("");
  const words = (value, digits = 4) => {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) {
      const power = Math.floor(Math.log10(size) + 1e-9);
      const head = Number((value / 10 ** power).toPrecision(digits));
      return (head === 1 ? "10" : `${head}·10`) + raised(power);
    }
    const [whole, rest] = String(Number(value.toPrecision(Math.max(digits, size >= 1 ? Math.ceil(Math.log10(size + 1)) : 0)))).split(".");
    const grouped = whole.length > 4 ? whole.replace(/\B(?=(\d{3})+$)/g, "\u2009") : whole;
    return rest ? `${grouped}.${rest}` : grouped;
  };

  const even = (low, high, count) => {
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((n) => n * power >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
    return found;
  };
  const ticks = (low, high, log, count) => {
    if (!log) return even(low, high, count);
    const [from, to] = [Math.log10(low), Math.log10(high)];
    const heads = to - from < 1.2 ? [1, 2, 3, 5] : to - from < 2.4 && count > 4 ? [1, 3] : [1];
    const stride = Math.max(1, Math.ceil((to - from) / count));
    const found = [];
    for (let n = Math.floor(from); n <= to; n += 1)
      if (n % stride === 0) for (const head of heads) found.push(head * 10 ** n);
    const inside = found.filter((v) => v >= low * 0.999 && v <= high * 1.001);
    return inside.length > 1 ? inside : even(low, high, count);
  };
  const scale = (low, high, log, from, to) => {
    const f = log ? Math.log10 : (v) => v;
    const [a, b] = [f(low), f(high)];
    const map = (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
    map.invert = (p) => {
      const v = a + ((p - from) / (to - from)) * (b - a);
      return log ? 10 ** v : v;
    };
    return map;
  };

  // ---- one chart

  class Chart {
    constructor(figure, prefix) {
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.prefix = prefix;
      this.marks = figure.classList.contains("marks");
      this.hover = null;
      this.near = null;
      this.plot = html("div", { class: "plot" });
      this.keys = html("ul", { class: "keys", "aria-label": "Lines" });
      figure.append(this.controls(), this.plot, this.keys);
      this.told = html("p", { class: "hint", id: `hint${this.prefix}` }, this.hint());
      figure.append(this.told);
      new ResizeObserver(() => this.draw()).observe(this.plot);
      addEventListener("hashchange", () => this.draw());
      this.draw();
    }

    hint() {
      const several = this.data.series.some((s) => s.seeds > 1);
      const [line, band] = this.marks ? ["Marks", "whiskers"] : ["Lines", "bands"];
      const seeds = several ? `${line} are means over seeds, ${band} go from the lowest to the highest seed. ` : "";
      const about = this.data.about ? `${this.data.about} ` : "";
      return `${about}${seeds}Point at the chart, or focus it and use the arrow keys, to read values; click to pin them.`;
    }

    get state() {
      const found = new URLSearchParams(location.hash.slice(1));
      const get = (key) => found.get(this.prefix + key);
      const { axes, metrics, start, series } = this.data;
      const x = get("x") in axes ? get("x") : start.x;
      const y = get("y") in metrics ? get("y") : start.y;
      const flag = (key, usual) => (get(key) === null ? usual : get(key) === "1");
      const row = Number(get("row")) in (this.data.rows ?? []) ? Number(get("row")) : 0;
      const off = get("off") === null ? series.flatMap((s, n) => (s.on ? [] : [n])) : get("off").split(".").filter(Boolean).map(Number);
      return {
        row, x, y, off: new Set(off), logx: flag("logx", axes[x].log), logy: flag("logy", metrics[y].log),
        band: flag("band", true), pareto: flag("pareto", x === "up" || x === "total" || x === "memory"), at: get("at") === null ? null : Number(get("at")),
      };
    }

    change(changes) {
      const found = new URLSearchParams(location.hash.slice(1));
      for (const [key, value] of Object.entries(changes)) {
        if (value === null) found.delete(this.prefix + key);
        else found.set(this.prefix + key, value === true ? "1" : value === false ? "0" : value);
      }
      location.hash = found;
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
      const [costs, drawn] = [Object.keys(axes), Object.entries(metrics)];
      this.bar = html("div", { class: "controls" });
      const rows = this.data.rows ?? [];
      if (rows.length > 1) this.bar.append(choice("row", "row", rows.map((name, n) => [n, name]), "off"));
      if (costs.length > 1) this.bar.append(choice("x", "against", costs.map((k) => [k, NAMES[k]]), "logx"));
      if (drawn.length > 1) this.bar.append(choice("y", "show", drawn.map(([k, m]) => [k, m.label]), "logy"));
      const several = this.data.series.some((s) => s.seeds > 1) ? [tick("band", "seeds")] : [];
      this.bar.append(html("div", { class: "ticks" }, tick("logx", "log x"), tick("logy", "log y"), ...several, tick("pareto", "Pareto front")));
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
          const [mean, low, high] = [y.mean[n], y.low[n], y.high[n]];
          if (mean === null || (state.logx && x <= 0) || (state.logy && low <= 0)) return;
          rows.push({ x, mean, low, high, whole: n < y.whole });
        });
        if (rows.length) lines.push({ number, series, rows });
      });
      return lines;
    }

    // The evaluations that no other run beats for the same cost or less; study/pareto.py computes the same for the tables.
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
      const width = Math.max(260, Math.round(this.plot.clientWidth));
      const height = Math.round(Math.min(460, Math.max(270, width * 0.5)));
      const lines = this.lines(state);
      const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "group", "aria-describedby": this.told.id });
      const focused = this.plot.contains(document.activeElement);
      this.lineup = null;
      if (!lines.length) {
        root.append(svg("text", { class: "empty", x: width / 2, y: height / 2, "text-anchor": "middle" }, "Nothing to draw: switch a line on, or a logarithmic axis off."));
        this.plot.replaceChildren(root);
        return;
      }
      const box = this.range(lines, state);
      const yTicks = ticks(box.y0, box.y1, state.logy, Math.round(height / 60));
      const left = 34 + 7 * Math.max(...yTicks.map((v) => words(v).length));
      const area = { left, right: width - 14, top: 10, bottom: height - 44 };
      const x = scale(box.x0, box.x1, state.logx, area.left, area.right);
      const y = scale(box.y0, box.y1, state.logy, area.bottom, area.top);
      const title = `${this.data.metrics[state.y].label} against ${this.data.axes[state.x].label}`;
      root.setAttribute("aria-label", title);
      root.append(...this.frame(state, box, area, x, y, yTicks));
      const inside = svg("g", { "clip-path": `url(#inside${this.prefix})` });
      const clip = svg("rect", { x: area.left - 4, y: area.top - 4, width: area.right - area.left + 8, height: area.bottom - area.top + 4 });
      root.append(svg("clipPath", { id: `inside${this.prefix}` }, clip), inside);
      const stops = state.pareto ? this.pareto(lines, state) : [];
      const drawn = lines.map((line) => (this.marks ? this.mark(line, state, x, y) : this.line(line, state, area, x, y)));
      const stairs = this.stairs(stops, x, y);
      inside.append(...(this.marks ? [...stairs, ...drawn] : [...drawn, ...stairs]));
      if (this.marks) this.name(drawn, lines, stops, area, x, y);
      this.lineup = { state, lines, area, x, y, root, width };
      this.reading = html("div", { class: "reading", "aria-live": "polite", hidden: "" });
      this.plot.replaceChildren(root, this.reading);
      if (focused) root.focus({ preventScroll: true });
      this.listen(root);
      this.read();
    }

    frame(state, box, area, x, y, yTicks) {
      const parts = [];
      const mid = (area.top + area.bottom) / 2;
      for (const value of yTicks) {
        parts.push(svg("line", { class: "grid", x1: area.left, x2: area.right, y1: y(value), y2: y(value) }));
        parts.push(svg("text", { x: area.left - 6, y: y(value) + 4, "text-anchor": "end" }, words(value)));
      }
      let free = -Infinity;  // labels that would overlap are left out
      for (const value of ticks(box.x0, box.x1, state.logx, Math.max(2, Math.round((area.right - area.left) / 85)))) {
        const [text, at] = [words(value), x(value)];
        const half = text.length * 3.4 + 4;
        parts.push(svg("line", { class: "grid", x1: at, x2: at, y1: area.top, y2: area.bottom }));
        if (at - half < free) continue;
        parts.push(svg("text", { x: Math.min(at, area.right + 12 - half), y: area.bottom + 17, "text-anchor": "middle" }, text));
        free = at + half;
      }
      parts.push(svg("path", { class: "frame", d: `M${area.left} ${area.top}V${area.bottom}H${area.right}` }));
      const limit = this.data.limits[state.x];
      if (limit !== undefined && limit >= box.x0 && limit <= box.x1 * 1.02)
        parts.push(svg("line", { class: "limit", x1: x(limit), x2: x(limit), y1: area.top, y2: area.bottom }, svg("title", {}, "budget")));
      parts.push(svg("text", { class: "label x", x: (area.left + area.right) / 2, y: area.bottom + 38, "text-anchor": "middle" }, this.data.axes[state.x].label));
      parts.push(svg("text", { class: "label y", transform: `translate(13 ${mid}) rotate(-90)`, "text-anchor": "middle" }, this.data.metrics[state.y].label));
      return parts;
    }

    line({ number, series, rows }, state, area, x, y) {
      const point = (r, of) => `${x(r.x).toFixed(1)} ${y(r[of]).toFixed(1)}`;
      const group = svg("g", { class: "series", "data-number": number, style: `--c:${this.color(series)}` });
      if (state.band && series.seeds > 1) {
        const there = rows.map((r) => point(r, "high"));
        const back = rows.map((r) => point(r, "low")).reverse();
        group.append(svg("path", { class: "band", d: `M${[...there, ...back].join("L")}Z` }));
      }
      group.append(svg("path", { class: "mean", "stroke-dasharray": DASHES[series.dash % 4], d: `M${rows.map((r) => point(r, "mean")).join("L")}` }));
      const last = rows[rows.length - 1];
      const [px, py] = [x(last.x), Math.max(area.top + 5, y(last.mean))];
      if (series.gone.length) group.append(svg("path", { class: "gone", d: `M${px - 5} ${py - 5}l10 10m0 -10l-10 10` }, svg("title", {}, series.gone.join("; "))));
      else group.append(svg("circle", { cx: px, cy: py, r: 3.5 }));
      return group;
    }

    // One value: a circle or a square, hollow if another one has its color, with a whisker over the seeds.
    mark({ number, series, rows: [row] }, state, x, y) {
      const group = svg("g", { class: "series", "data-number": number, style: `--c:${this.color(series)}` });
      const [px, py] = [x(row.x), y(row.mean)];
      if (state.band && row.high > row.low)
        group.append(svg("path", { class: "whisker", d: `M${px - 4} ${y(row.low)}h8m-4 0V${y(row.high)}m-4 0h8` }));
      const look = series.dash % 2 ? "mark hollow" : "mark";
      if (series.gone.length) group.append(svg("path", { class: "gone", d: `M${px - 5} ${py - 5}l10 10m0 -10l-10 10` }, svg("title", {}, series.gone.join("; "))));
      else if (series.dash % 4 < 2) group.append(svg("circle", { class: look, cx: px, cy: py, r: 5 }));
      else group.append(svg("rect", { class: look, x: px - 4.5, y: py - 4.5, width: 9, height: 9 }));
      return group;
    }

    // Names beside the marks where there is room; the legend has all of them.
    name(groups, lines, stops, area, x, y) {
      const taken = lines.map(({ rows: [r] }) => [x(r.x) - 8, Math.min(y(r.high), y(r.mean) - 8), x(r.x) + 8, Math.max(y(r.low), y(r.mean) + 8)]);
      stops.slice(1).forEach((stop, n) => {
        const [left, right, ...ends] = [x(stops[n].x), x(stop.x), y(stops[n].y), y(stop.y)];
        taken.push([left, ends[0] - 1, right, ends[0] + 1], [right - 1, Math.min(...ends), right + 1, Math.max(...ends)]);
      });
      const free = ([a, b, c, d]) =>
        a >= area.left && c <= area.right && b >= area.top && d <= area.bottom && taken.every(([e, f, g, h]) => c <= e || a >= g || d <= f || b >= h);
      lines.forEach(({ series, rows: [r] }, n) => {
        const [px, py, half] = [x(r.x), y(r.mean), series.name.length * 3.5];
        const [above, below] = [Math.min(y(r.high), py - 7) - 5, Math.max(y(r.low), py + 7) + 13];
        const places = [["start", px + 9, py + 4], ["end", px - 9, py + 4], ["middle", px, above], ["middle", px, below]];
        for (const [anchor, at, base] of places) {
          const left = at - { start: 0, end: 2 * half, middle: half }[anchor];
          const box = [left, base - 11, left + 2 * half, base + 3];
          if (!free(box)) continue;
          taken.push(box);
          groups[n].append(svg("text", { class: "name", x: at, y: base, "text-anchor": anchor }, series.name));
          break;
        }
      });
    }

    stairs(stops, x, y) {
      if (!stops.length) return [];
      const d = stops.map((s, n) => (n ? `H${x(s.x).toFixed(1)}V${y(s.y).toFixed(1)}` : `M${x(s.x).toFixed(1)} ${y(s.y).toFixed(1)}`)).join("");
      const parts = [svg("path", { class: "pareto", d, "data-stops": JSON.stringify(stops.map((s) => [s.number, s.x, s.y])) })];
      let drawn = null;
      for (const stop of stops) {
        const here = [x(stop.x), y(stop.y)];
        if (this.marks) break;  // the marks are the stops
        if (drawn && Math.hypot(here[0] - drawn[0], here[1] - drawn[1]) < 16) continue;
        parts.push(svg("circle", { class: "stop", cx: here[0], cy: here[1], r: 3.2 }, svg("title", {}, `on the Pareto front: ${this.data.series[stop.number].name}`)));
        drawn = here;
      }
      return parts;
    }

    color(series) {
      return series.color === "#000000" ? "var(--ink)" : series.color;
    }

    // Set controls and legend to the state.
    show(state) {
      for (const input of this.bar.querySelectorAll("input")) {
        const key = input.dataset.key ?? input.closest("fieldset").dataset.key;
        input.checked = input.type === "radio" ? input.value === String(state[key]) : state[key];
      }
      if (!this.keys.children.length) this.data.series.forEach((series, number) => this.keys.append(html("li", {}, this.key(series, number))));
      [...this.keys.children].forEach((item, number) => {
        item.hidden = this.data.series[number].row !== state.row;
        item.firstChild.setAttribute("aria-pressed", String(!state.off.has(number)));
      });
    }

    key(series, number) {
      const gone = series.gone.length ? { title: series.gone.join("; ") } : {};
      const button = html("button", { class: `key dash-${series.dash % 4}`, type: "button", style: `--c:${this.color(series)}`, ...gone }, series.name + (series.gone.length ? " ✕" : ""));
      button.addEventListener("click", () => {
        const off = this.state.off;
        if (!off.delete(number)) off.add(number);
        this.change({ off: [...off].sort((a, b) => a - b).join(".") });
      });
      const lift = (value) => () => this.lift(value);
      for (const event of ["pointerenter", "focus"]) button.addEventListener(event, lift(number));
      for (const event of ["pointerleave", "blur"]) button.addEventListener(event, lift(null));
      return button;
    }

    lift(number) {
      const groups = [...this.plot.querySelectorAll(".series")];
      const known = groups.some((g) => Number(g.dataset.number) === number);
      this.plot.classList.toggle("dimmed", known);
      for (const group of groups) group.classList.toggle("near", known && Number(group.dataset.number) === number);
    }

    // ---- reading values

    listen(root) {
      const place = (event) => {
        const at = (event.clientX - root.getBoundingClientRect().left) * (this.lineup.width / root.clientWidth);
        const { area, x } = this.lineup;
        return x.invert(Math.min(area.right, Math.max(area.left, at)));
      };
      root.addEventListener("pointermove", (event) => {
        const rect = root.getBoundingClientRect();
        this.height = (event.clientY - rect.top) * (this.lineup.width / root.clientWidth);
        this.hover = place(event);
        this.read();
      });
      root.addEventListener("pointerleave", () => { this.hover = this.height = null; this.read(); });
      root.addEventListener("click", (event) => this.change({ at: Number(place(event).toPrecision(4)) }));
      root.addEventListener("keydown", (event) => this.step(event));
    }

    step(event) {
      const all = [...new Set(this.lineup.lines.flatMap(({ rows }) => rows.map((r) => r.x)))].sort((a, b) => a - b);
      const at = this.state.at ?? -Infinity;
      const next = { ArrowRight: all.find((v) => v > at), ArrowLeft: all.findLast((v) => v < at), Home: all[0], End: all.at(-1) };
      if (event.key === "Escape") this.change({ at: null });
      else if (next[event.key] !== undefined) this.change({ at: next[event.key] });
      else return;
      event.preventDefault();
    }

    // The values of all lines at one place: the last evaluation of each that costs no more.
    read() {
      const { state, lines, area, x, y, root, width } = this.lineup;
      const at = this.hover ?? state.at;
      root.querySelectorAll(".guide, .dot").forEach((node) => node.remove());
      this.reading.hidden = at === null || !Number.isFinite(at);
      if (this.reading.hidden) return;
      const found = lines.flatMap(({ number, series, rows }) => {
        const row = rows.findLast((r) => r.x <= at * (1 + 1e-9));
        const over = series.gone.length === series.seeds && rows[rows.length - 1].x < at;
        return row && !over ? [{ number, series, row }] : [];
      });
      const sign = this.data.metrics[state.y].goal === "max" ? -1 : 1;
      found.sort((a, b) => sign * (a.row.mean - b.row.mean));
      const place = Math.min(area.right, Math.max(area.left, x(at)));
      root.append(svg("line", { class: "guide", x1: place, x2: place, y1: area.top, y2: area.bottom }));
      for (const { series, row } of found) {
        const dot = svg("circle", { cx: x(row.x), cy: y(row.mean), r: 4 });
        root.append(svg("g", { class: "series dot", style: `--c:${this.color(series)}` }, dot));
      }
      const apart = ({ row }) => Math.abs(y(row.mean) - this.height);
      const near = this.hover !== null && found.length ? found.reduce((a, b) => (apart(b) < apart(a) ? b : a)) : null;
      const item = ({ number, series, row }) => {
        const several = series.seeds > 1 && row.high > row.low ? ` (${words(row.low, 3)} to ${words(row.high, 3)})` : "";
        const name = html("span", near?.number === number ? { class: "near" } : {}, series.name);
        return html("li", { style: `--c:${this.color(series)}` }, name, html("b", {}, words(row.mean) + several));
      };
      this.reading.replaceChildren(`${this.data.axes[state.x].label}: ${words(at, 3)}`, html("ul", {}, ...found.slice(0, 14).map(item)));
      // On the side with more room, in the half with fewer points.
      const right = place < (area.left + area.right) / 2;
      const across = right ? { left: `${place + 14}px`, right: "" } : { left: "", right: `${width - place + 14}px` };
      const ends = [place, place + (right ? 1 : -1) * (14 + this.reading.offsetWidth)].sort((a, b) => a - b);
      const points = lines.flatMap(({ rows }) => rows.filter((r) => x(r.x) >= ends[0] && x(r.x) <= ends[1]).map((r) => y(r.mean)));
      const high = points.filter((p) => p < (area.top + area.bottom) / 2).length;
      const top = high <= points.length / 2;
      Object.assign(this.reading.style, across, { top: top ? "8px" : "", bottom: top ? "" : "56px" });
    }
  }

  // ---- tables

  const worth = (cell) => {
    const number = parseFloat(cell.textContent);
    return Number.isNaN(number) ? null : number;
  };
  const sort = (table, column, down) => {
    const rows = [...table.tBodies[0].rows];
    const numeric = rows.some((row) => worth(row.cells[column]) !== null);
    const sign = down ? -1 : 1;
    rows.sort((a, b) => {
      if (!numeric) return sign * a.cells[column].textContent.localeCompare(b.cells[column].textContent);
      const [p, q] = [worth(a.cells[column]), worth(b.cells[column])];
      return p === null || q === null ? (p === null) - (q === null) : sign * (p - q);  // cells without a number come last
    });
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent) return;
      const button = html("button", { type: "button" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sort(table, column, down);
      });
    });
  }

  const counted = (kind, prefix) =>
    document.querySelectorAll(`figure.chart${kind}`).forEach((figure, n) => new Chart(figure, n || prefix ? `${prefix}${n ? n + 1 : ""}.` : ""));
  counted(":not(.marks)", "");
  counted(".marks", "m");
})();
