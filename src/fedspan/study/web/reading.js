// Reading values: with the pointer, with the arrow keys, or pinned by a click.

const listen = (chart, root) => {
  const place = (event) => {
    const at = (event.clientX - root.getBoundingClientRect().left) * (chart.lineup.width / root.clientWidth);
    const { area, x } = chart.lineup;
    return x.invert(Math.min(area.right, Math.max(area.left, at)));
  };
  root.addEventListener("pointermove", (event) => {
    const rect = root.getBoundingClientRect();
    chart.height = (event.clientY - rect.top) * (chart.lineup.width / root.clientWidth);
    chart.hover = place(event);
    read(chart);
  });
  root.addEventListener("pointerleave", () => { chart.hover = chart.height = null; read(chart); });
  root.addEventListener("click", (event) => chart.change({ at: Number(place(event).toPrecision(4)) }));
  root.addEventListener("keydown", (event) => step(chart, event));
};

const step = (chart, event) => {
  const all = [...new Set(chart.lineup.lines.flatMap(({ rows }) => rows.map((r) => r.x)))].sort((a, b) => a - b);
  const at = chart.state.at ?? -Infinity;
  const next = { ArrowRight: all.find((v) => v > at), ArrowLeft: all.findLast((v) => v < at), Home: all[0], End: all.at(-1) };
  if (event.key === "Escape") chart.change({ at: null });
  else if (next[event.key] !== undefined) chart.change({ at: next[event.key] });
  else return;
  event.preventDefault();
};

// Of each line the last evaluation that costs no more than a place on the x axis.
const readAt = ({ data, state, lines }, at) => {
  const found = lines.flatMap(({ number, series, rows }) => {
    const row = rows.findLast((r) => r.x <= at * (1 + 1e-9));
    const over = series.gone.length === series.seeds && rows[rows.length - 1].x < at;
    return row && !over ? [{ number, series, row }] : [];
  });
  const sign = data.metrics[state.y].goal === "max" ? -1 : 1;
  return found.sort((a, b) => sign * (a.row.mean - b.row.mean));
};

const read = (chart) => {
  const { data, state, area, strip, x, y, root } = chart.lineup;
  const at = chart.hover ?? state.at;
  root.querySelectorAll(".guide, .dot").forEach((node) => node.remove());
  chart.reading.hidden = at === null || !Number.isFinite(at);
  if (chart.reading.hidden) return;
  const found = readAt(chart.lineup, at);
  const place = Math.min(area.right, Math.max(area.left, x(at)));
  root.append(svg("line", { class: "guide", x1: place, x2: place, y1: area.top, y2: strip ? strip.bottom : area.bottom }));
  for (const { number, series, row } of found) {
    const dot = group(series, number, " dot");
    dot.append(svg("circle", { cx: x(row.x), cy: y(row.mean), r: 4 }));
    root.append(dot);
  }
  const apart = ({ row }) => Math.abs(y(row.mean) - chart.height);
  const near = chart.hover !== null && found.length ? found.reduce((a, b) => (apart(b) < apart(a) ? b : a)) : null;
  const item = ({ number, series, row }) => {
    const several = series.seeds > 1 && row.high > row.low ? ` (${words(row.low, 3)} to ${words(row.high, 3)})` : "";
    const name = html("span", near?.number === number ? { class: "near" } : {}, series.name);
    const test = strip && typeof row.test === "number" ? `, s̄ ${words(row.test, 2)}, ${row.on >= 0.5 ? "on" : "off"}` : "";
    return html("li", {}, sample(series, true), name, html("b", {}, words(row.mean) + several), test);
  };
  chart.reading.replaceChildren(`${data.axes[state.x].label}: ${words(at, 3)}`, html("ul", {}, ...found.slice(0, 14).map(item)));
  settle(chart, place);
};

// The box of values goes to the side with more room, in the half with fewer points.
const settle = (chart, place) => {
  const { lines, area, strip, x, y, width } = chart.lineup;
  const right = place < (area.left + area.right) / 2;
  const across = right ? { left: `${place + 14}px`, right: "" } : { left: "", right: `${width - place + 14}px` };
  const ends = [place, place + (right ? 1 : -1) * (14 + chart.reading.offsetWidth)].sort((a, b) => a - b);
  const points = lines.flatMap(({ rows }) => rows.filter((r) => x(r.x) >= ends[0] && x(r.x) <= ends[1]).map((r) => y(r.mean)));
  const top = points.filter((p) => p < (area.top + area.bottom) / 2).length <= points.length / 2;
  Object.assign(chart.reading.style, across, { top: top ? "8px" : "", bottom: top ? "" : `${56 + (strip ? STRIP : 0)}px` });
};
