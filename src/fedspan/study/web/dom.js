// Elements, numbers and scales.

const put = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const html = (tag, attributes = {}, ...children) => put(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const textWidth = (text) => {
  pixel.font = "12px system-ui, sans-serif";
  return pixel.measureText(text).width;
};

// The address holds the view: every control changes the hash, and only the hash decides what is shown.
const view = () => new URLSearchParams(location.hash.slice(1));
const setView = (changes, quietly = false) => {
  const found = view();
  for (const [key, value] of Object.entries(changes)) {
    if (value === null) found.delete(key);
    else found.set(key, value === true ? "1" : value === false ? "0" : value);
  }
  if (`#${found}` === location.hash) return;
  history[quietly ? "replaceState" : "pushState"](null, "", `#${found}`);
  if (!quietly) dispatchEvent(new Event("hashchange"));  // now, not when the browser comes to it
};

const raised = (n) => [...String(n)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("");
const words = (value, digits = 4) => {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) {
    const power = Math.floor(Math.log10(size) + 1e-9);
    const head = Number((value / 10 ** power).toPrecision(digits));
    return (head === 1 ? "10" : `${head}·10`) + raised(power);
  }
  const all = Math.max(digits, size >= 1 ? Math.ceil(Math.log10(size + 1)) : 0);
  const [whole, rest] = String(Number(value.toPrecision(all))).split(".");
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
// Labels of ticks, with as many digits as tell them apart.
const labelled = (values) => {
  for (let digits = 4; digits < 13; digits++) {
    const found = values.map((value) => words(value, digits));
    if (new Set(found).size === values.length) return found;
  }
  return values.map((value) => words(value));
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
