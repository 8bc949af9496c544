// What stands in a plot. A line is told by its color, its dashes and its marker, so that no one needs the color.

const DASHES = ["", "7 4", "2 4", "9 3 2 3"];
const SHAPES = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
  (x, y, r) => `M${x - 0.9 * r} ${y - 0.9 * r}h${1.8 * r}v${1.8 * r}h${-1.8 * r}Z`,
  (x, y, r) => `M${x} ${y - 1.2 * r}l${1.2 * r} ${2.1 * r}h${-2.4 * r}Z`,
  (x, y, r) => `M${x} ${y - 1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}Z`,
  (x, y, r) => `M${x} ${y + 1.2 * r}l${1.2 * r} ${-2.1 * r}h${-2.4 * r}Z`,
  (x, y, r) => `M${x - r / 2.4} ${y - 1.2 * r}h${r / 1.2}v${0.78 * r}h${0.78 * r}v${r / 1.2}h${-0.78 * r}v${0.78 * r}h${-r / 1.2}v${-0.78 * r}h${-0.78 * r}v${-r / 1.2}h${0.78 * r}Z`,
  (x, y, r) => `M${x} ${y - 1.7 * r}l${0.5 * r} ${1.2 * r}l${1.2 * r} ${0.5 * r}l${-1.2 * r} ${0.5 * r}l${-0.5 * r} ${1.2 * r}l${-0.5 * r} ${-1.2 * r}l${-1.2 * r} ${-0.5 * r}l${1.2 * r} ${-0.5 * r}Z`,
];
const GONE = (x, y) => `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`;

const colorOf = (series) => (series.color === "#000000" ? "var(--ink)" : series.color);
const group = (series, number, kind = "") =>
  svg("g", { class: `series${kind}`, "data-number": number, style: `--c:${colorOf(series)}` });
const marker = (series, x, y, r = 4) => {
  const hollow = Math.floor(series.marker / SHAPES.length) % 2 ? " hollow" : "";
  return svg("path", { class: `mark${hollow}`, d: SHAPES[series.marker % SHAPES.length](x, y, r) });
};
const cross = (series, x, y) => svg("path", { class: "gone", d: GONE(x, y) }, svg("title", {}, series.gone.join("; ")));

// The line and marker of a series, for the legend.
const sample = (series, marks) => {
  const all = group(series, undefined);
  if (!marks) all.append(svg("path", { class: "mean", "stroke-dasharray": DASHES[series.dash % 4], d: "M1 7H33" }));
  all.append(marker(series, 17, 7));
  return svg("svg", { class: "sample", viewBox: "0 0 34 14", width: 34, height: 14, "aria-hidden": "true" }, all);
};

const frame = ({ data, state, box, area, x, y, yTicks }) => {
  const parts = [];
  const yTexts = labelled(yTicks);
  for (const [number, value] of yTicks.entries()) {
    parts.push(svg("line", { class: "grid", x1: area.left, x2: area.right, y1: y(value), y2: y(value) }));
    parts.push(svg("text", { x: area.left - 6, y: y(value) + 4, "text-anchor": "end" }, yTexts[number]));
  }
  let free = -Infinity;  // labels that would overlap are left out
  const xTicks = ticks(box.x0, box.x1, state.logx, Math.max(2, Math.round((area.right - area.left) / 85)));
  const xTexts = labelled(xTicks);
  for (const [number, value] of xTicks.entries()) {
    const [text, at] = [xTexts[number], x(value)];
    const half = text.length * 3.4 + 4;
    parts.push(svg("line", { class: "grid", x1: at, x2: at, y1: area.top, y2: area.bottom }));
    if (at - half < free) continue;
    parts.push(svg("text", { x: Math.min(at, area.right + 12 - half), y: area.bottom + 17, "text-anchor": "middle" }, text));
    free = at + half;
  }
  parts.push(svg("path", { class: "frame", d: `M${area.left} ${area.top}V${area.bottom}H${area.right}` }));
  const limit = data.limits[state.x];
  if (limit !== undefined && limit >= box.x0 && limit <= box.x1 * 1.02)
    parts.push(
      svg("line", { class: "limit", x1: x(limit), x2: x(limit), y1: area.top, y2: area.bottom }),
      svg("text", { x: x(limit) - 5, y: area.top + 10, "text-anchor": "end" }, "budget"),
    );
  const middle = [(area.left + area.right) / 2, (area.top + area.bottom) / 2];
  parts.push(svg("text", { class: "label x", x: middle[0], y: area.bottom + 38, "text-anchor": "middle" }, data.axes[state.x].label));
  parts.push(svg("text", { class: "label y", transform: `translate(13 ${middle[1]}) rotate(-90)`, "text-anchor": "middle" }, data.metrics[state.y].label));
  return parts;
};

const drawLine = ({ number, series, rows }, { state, x, y }) => {
  const point = (r, of) => `${x(r.x).toFixed(1)} ${y(r[of]).toFixed(1)}`;
  const all = group(series, number);
  if (state.band && series.seeds > 1) {
    const there = rows.map((r) => point(r, "high"));
    const back = rows.map((r) => point(r, "low")).reverse();
    all.append(svg("path", { class: "band", d: `M${[...there, ...back].join("L")}Z` }));
  }
  const d = `M${rows.map((r) => point(r, "mean")).join("L")}`;
  all.append(svg("path", { class: "mean", "stroke-dasharray": DASHES[series.dash % 4], d }));
  return all;
};

// Markers at the end of a line and along it; those of several lines are staggered, so that lines on top of each other show.
const drawMarkers = ({ number, series, rows }, { area, x, y, lines }) => {
  const all = group(series, number, " markers");
  const step = Math.max(90, (area.right - area.left) / 7);
  const place = lines.findIndex((line) => line.number === number);
  let next = area.left + step * (0.25 + place / lines.length);
  const last = rows[rows.length - 1];
  const end = [x(last.x), Math.max(area.top + 5, y(last.mean))];
  for (const row of rows) {
    const [px, py] = [x(row.x), y(row.mean)];
    if (px < next || px > end[0] - 14 || py < area.top) continue;
    all.append(marker(series, px, py));
    while (next <= px) next += step;
  }
  all.append(series.gone.length ? cross(series, ...end) : marker(series, ...end));
  return all;
};

// One value, with a whisker over the seeds.
const drawMark = ({ number, series, rows: [row] }, { state, x, y }) => {
  const all = group(series, number);
  const [px, py] = [x(row.x), y(row.mean)];
  if (state.band && row.high > row.low)
    all.append(svg("path", { class: "whisker", d: `M${px - 4} ${y(row.low)}h8m-4 0V${y(row.high)}m-4 0h8` }));
  all.append(series.gone.length ? cross(series, px, py) : marker(series, px, py, 5));
  return all;
};

// Names of the lines that reach the right side, in a column beside it, moved apart where they would overlap.
const nameColumn = ({ lines, area, x, y, side, atEdge }) => {
  const ended = lines.filter(({ rows }) => atEdge(rows));
  const names = ended.map(({ number, series, rows }) => ({ number, series, row: rows[rows.length - 1] }));
  const clamp = (v) => Math.min(area.bottom, Math.max(area.top + 4, v));
  const found = names.map((one) => ({ ...one, at: clamp(y(one.row.mean)) })).sort((a, b) => a.at - b.at);
  if (!side || found.length * 15 > area.bottom - area.top) return [];
  found.forEach((one, n) => { if (n) one.at = Math.max(one.at, found[n - 1].at + 15); });
  found.reverse().forEach((one, n) => { one.at = Math.min(one.at, n ? found[n - 1].at - 15 : area.bottom); });
  return found.map(({ number, series, row, at }) => {
    const all = group(series, number);
    const from = [x(row.x) + 6, clamp(y(row.mean))];
    all.append(svg("path", { class: "leader", d: `M${from[0]} ${from[1]}L${area.right + 20} ${at}` }));
    all.append(series.gone.length ? cross(series, area.right + 27, at) : marker(series, area.right + 27, at));
    all.append(svg("text", { class: "name", x: area.right + 36, y: at + 4 }, short(series.name)));
    return all;
  });
};
const short = (text) => (text.length > 28 ? `${text.slice(0, 27)}…` : text);

// Names beside marks, or beside lines that end inside the plot, where there is room; the legend has all of them.
const nameInside = ({ lines, area, x, y, stops, marks, side, atEdge }) => {
  const taken = [];
  for (const { rows } of lines)
    for (const r of rows) taken.push([x(r.x) - 7, Math.min(y(r.high), y(r.mean) - 7), x(r.x) + 7, Math.max(y(r.low), y(r.mean) + 7)]);
  stops.slice(1).forEach((stop, n) => {
    const [left, right, ...ends] = [x(stops[n].x), x(stop.x), y(stops[n].y), y(stop.y)];
    taken.push([left, ends[0] - 1, right, ends[0] + 1], [right - 1, Math.min(...ends), right + 1, Math.max(...ends)]);
  });
  const free = ([a, b, c, d]) =>
    a >= area.left && c <= area.right && b >= area.top && d <= area.bottom && taken.every(([e, f, g, h]) => c <= e || a >= g || d <= f || b >= h);
  return lines.flatMap(({ number, series, rows }) => {
    const r = rows[rows.length - 1];
    if (!marks && (!side || atEdge(rows))) return [];
    const [px, py, half] = [x(r.x), Math.max(area.top + 7, y(r.mean)), textWidth(short(series.name)) / 2 + 1];
    const [above, below] = [Math.min(y(r.high), py - 7) - 5, Math.max(y(r.low), py + 7) + 13];
    const places = [["start", px + 10, py + 4], ["end", px - 10, py + 4], ["middle", px, above], ["middle", px, below]];
    for (const far of [24, 40, 60, 85, 115])  // farther away, with a thin line to the end
      for (const up of [-far, far]) places.push(["start", px + 16, py + up], ["end", px - 16, py + up]);
    for (const [anchor, at, base] of places) {
      const left = at - { start: 0, end: 2 * half, middle: half }[anchor];
      const box = [left, base - 11, left + 2 * half, base + 3];
      if (!free(box)) continue;
      taken.push(box);
      const all = group(series, number);
      if (Math.abs(base - py) > 22) all.append(svg("path", { class: "leader", d: `M${px} ${py}L${at} ${base - 4}` }));
      all.append(svg("text", { class: "name", x: at, y: base, "text-anchor": anchor }, short(series.name)));
      return [all];
    }
    return [];
  });
};

// Below the plot: s̄ of each tested correction, thick where the correction is on; above ½ it pays.
const STRIP = 92;
const drawStrip = ({ lines, area, strip, x, width }) => {
  if (!strip) return [];
  const y = scale(0, 1, false, strip.bottom, strip.top);
  const caption = width < 480 ? "Test of the correction. Thick: on." : "Test of the correction, s̄: above ½ it pays. Thick: on.";
  const parts = [svg("text", { class: "caption", x: area.left, y: strip.top - 7 }, caption)];
  for (const [value, text] of [[0, "0"], [0.5, "½"], [1, "1"]]) {
    const rule = value === 0.5 ? "limit" : "grid";
    parts.push(svg("line", { class: rule, x1: area.left, x2: area.right, y1: y(value), y2: y(value) }));
    parts.push(svg("text", { x: area.left - 6, y: y(value) + 4, "text-anchor": "end" }, text));
  }
  for (const { number, series, rows } of lines) {
    const known = rows.filter((r) => typeof r.test === "number");
    const point = (r) => `${x(r.x).toFixed(1)} ${y(r.test).toFixed(1)}`;
    if (!known.length) continue;
    const all = group(series, number, " switch");
    const dashes = { "stroke-dasharray": DASHES[series.dash % 4] };
    all.append(svg("path", { class: "mean off", ...dashes, d: `M${known.map(point).join("L")}` }));
    const on = known.flatMap((r, n) => (n && r.on >= 0.5 ? [`M${point(known[n - 1])}L${point(r)}`] : []));
    if (on.length) all.append(svg("path", { class: "mean on", d: on.join("") }));
    parts.push(all);
  }
  return parts;
};

const stairs = (stops, x, y) => {
  if (!stops.length) return [];
  const d = stops.map((s, n) => (n ? `H${x(s.x).toFixed(1)}V${y(s.y).toFixed(1)}` : `M${x(s.x).toFixed(1)} ${y(s.y).toFixed(1)}`)).join("");
  const title = svg("title", {}, "Pareto front");
  return [svg("path", { class: "pareto", d, "data-stops": JSON.stringify(stops.map((s) => [s.number, s.x, s.y])) }, title)];
};
