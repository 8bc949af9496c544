// Downloads: the chart as a picture, and its numbers.

const save = (name, blob) => {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
const STYLED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-size", "font-weight", "paint-order"];

// A color as #rrggbb, which every program that reads SVG understands.
const plainColor = (color) => {
  pixel.clearRect(0, 0, 1, 1);
  pixel.fillStyle = color;
  pixel.fillRect(0, 0, 1, 1);
  return `#${[...pixel.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((n) => n.toString(16).padStart(2, "0")).join("")}`;
};

// The drawing with its styles inside, on the page's background, and the legend below it.
const picture = (chart) => {
  const root = chart.plot.querySelector("svg");
  const copy = root.cloneNode(true);
  const copies = [...copy.querySelectorAll("*")];
  [...root.querySelectorAll("*")].forEach((node, n) => {
    const style = getComputedStyle(node);
    for (const name of STYLED) {
      const value = style.getPropertyValue(name);
      const color = (name === "fill" || name === "stroke") && value !== "none";
      copies[n].setAttribute(name, color ? plainColor(value) : value);
    }
    copies[n].removeAttribute("style");
  });
  const [, , width, height] = root.getAttribute("viewBox").split(" ").map(Number);
  const styled = getComputedStyle(document.body);
  const legend = legendOf(chart, width, height, plainColor(styled.color));
  const whole = height + legend.height;
  put(copy, { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${whole}`, width, height: whole, "font-family": "sans-serif", "font-size": 12 }, legend.parts);
  copy.prepend(svg("rect", { width, height: whole, fill: plainColor(styled.backgroundColor) }));
  return { text: new XMLSerializer().serializeToString(copy), width, height: whole };
};

const drawnColor = (chart, number) => {
  const style = getComputedStyle(chart.plot.querySelector(`[data-number="${number}"] :is(.mean, .mark, .gone)`));
  return plainColor(chart.marks && style.fill !== "none" ? style.fill : style.stroke);
};
const legendOf = (chart, width, top, ink) => {
  const parts = [];
  let [x, y] = [16, top + 12];
  for (const { number, series } of chart.lineup?.lines ?? []) {
    const room = 54 + textWidth(series.name);
    if (x > 16 && x + room > width) [x, y] = [16, y + 20];
    const color = drawnColor(chart, number);
    const line = svg("path", { d: `M${x} ${y}h30`, stroke: color, "stroke-width": 2, fill: "none", "stroke-dasharray": DASHES[series.dash % 4] });
    const shape = marker(series, x + 15, y);
    put(shape, { fill: shape.classList.contains("hollow") ? "none" : color, stroke: color, "stroke-width": 1.5 }, []);
    parts.push(line, shape, svg("text", { x: x + 36, y: y + 4, fill: ink }, series.name));
    x += room;
  }
  return { parts, height: y - top + 16 };
};

const savePng = (chart, name) => {
  const { text, width, height } = picture(chart);
  const image = new Image();
  image.onload = () => {
    const canvas = put(document.createElement("canvas"), { width: 2 * width, height: 2 * height }, []);
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    canvas.toBlob((blob) => save(name, blob), "image/png");
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
};

// Every line of the chart with all its costs and metrics, one row per evaluation.
const csvOf = ({ axes, metrics, rows, series }) => {
  const quote = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const stats = Object.keys(metrics).flatMap((m) => ["mean", "low", "high"].map((of) => [m, of]));
  const head = ["row", "name", "seeds", ...Object.values(axes).map((a) => a.label), ...stats.map(([m, of]) => `${metrics[m].label} ${of}`)];
  const lines = series.flatMap((s) => s.x[Object.keys(axes)[0]].map((_, n) => [
    rows[s.row] ?? "", s.name, s.seeds, ...Object.keys(axes).map((a) => s.x[a][n]),
    ...stats.map(([m, of]) => (s.y[m]?.[of] ?? s.y[m]?.mean)?.[n] ?? ""),
  ]));
  return [head, ...lines].map((line) => line.map((value) => quote(String(value))).join(",")).join("\n") + "\n";
};

const downloads = (chart) => {
  const name = (chart.figure.getAttribute("aria-label") || "chart").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").toLowerCase();
  const text = (kind, make) => () => save(`${name}.${kind}`, new Blob([make()], { type: { svg: "image/svg+xml", csv: "text/csv", json: "application/json" }[kind] }));
  const kinds = {
    SVG: text("svg", () => picture(chart).text), PNG: () => savePng(chart, `${name}.png`),
    CSV: text("csv", () => csvOf(chart.data)), JSON: text("json", () => JSON.stringify(chart.data)),
  };
  const button = ([kind, act]) => {
    const one = html("button", { type: "button", "aria-label": `Download ${kind}` }, kind);
    one.addEventListener("click", act);
    return one;
  };
  return html("p", { class: "downloads" }, "Download ", ...Object.entries(kinds).map(button));
};
