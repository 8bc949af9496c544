// The axis of hours: over a link and devices of the reader's choice, from the bytes and local steps that the runs have
// recorded, or by the runs' own clock until a slider is moved. Keys in the address: link, step and target.

const LINK = { key: "link", title: "Link, both ways", unit: "Mbit/s", usual: 10, low: -1, high: 4 };
const STEP = { key: "step", title: "A local step", unit: "s", usual: 0.05, low: -4, high: 2 };

// Hours up to each evaluation if all clients of a round have the same link and device.
const hoursOf = ({ x, cohort, steps }, bytes, link, step) =>
  x.round.map((t, n) => ((8e-6 * bytes * x.total[n]) / cohort / link + t * steps * step) / 3600);

// What each line takes to reach a target, the fastest first; those that do not reach it come last.
const reached = (lines, target, sign) =>
  lines
    .map(({ series, rows }) => ({ name: series.name, at: rows.find((r) => sign * (r.mean - target) >= 0)?.x ?? Infinity }))
    .sort((a, b) => (a.at === b.at ? 0 : a.at - b.at));

// The best value that every line reaches, which is a target at first.
const shared = (lines, sign) => {
  const worst = Math.min(...lines.map(({ rows }) => Math.max(...rows.map((r) => sign * r.mean))));
  const digits = 10 ** (2 - Math.floor(Math.log10(Math.abs(worst) || 1)));
  return (sign * Math.floor(worst * digits)) / digits;
};

class Hours {
  constructor(chart) {
    this.chart = chart;
    this.ofRuns = chart.data.series.map((series) => series.x.hours);
    this.own = this.ofRuns.every(Boolean);
    this.linked = chart.data.series.every((series) => series.steps);
    this.sliders = this.linked ? [LINK, STEP].map((one) => this.slider(one)) : [];
    this.target = html("input", { type: "number", step: "any" });
    this.target.addEventListener("input", () => this.set("target", this.target.value === "" ? null : Number(this.target.value)));
    this.first = html("p", { class: "first", role: "status" });
    const back = html("button", { type: "button" }, "The runs' own clock");
    back.addEventListener("click", () => { this.set("link", null); this.set("step", null); });
    this.back = back;
    const row = html("div", { class: "ticks" }, ...this.sliders.map(({ label }) => label), html("label", {}, "Target", this.target), back);
    this.box = html("div", { class: "hours" }, row, this.first);
  }

  slider({ key, title, unit, usual, low, high }) {
    const input = html("input", { type: "range", min: low, max: high, step: 0.05, "aria-label": `${title}, ${unit}` });
    const output = html("output");
    input.addEventListener("input", () => this.set(key, Number((10 ** input.value).toPrecision(3))));
    const set = (value) => {
      input.value = Math.log10(value ?? usual);
      output.textContent = value === null && this.own ? "of the runs" : `${words(value ?? usual, 3)} ${unit}`;
    };
    return { label: html("label", {}, title, input, output), set };
  }

  set(key, value) {
    setView({ [this.chart.prefix + key]: value }, true);
    this.chart.draw();
  }

  // The hours of every line for the state of the sliders.
  fill({ link, step }) {
    const own = this.own && link === null && step === null;
    this.chart.data.series.forEach((series, n) => {
      if (own) series.x.hours = this.ofRuns[n];
      else if (this.linked) series.x.hours = hoursOf(series, this.chart.data.bytes, link ?? LINK.usual, step ?? STEP.usual);
    });
  }

  show(state, lines) {
    this.box.hidden = state.x !== "hours";
    if (this.box.hidden) return;
    this.sliders.forEach(({ set }, n) => set([state.link, state.step][n]));
    this.back.hidden = !this.own || (state.link === null && state.step === null);
    const { label, goal } = this.chart.data.metrics[state.y];
    const sign = goal === "max" ? 1 : -1;
    const target = state.target ?? (lines.length ? shared(lines, sign) : 0);
    if (document.activeElement !== this.target) this.target.value = target;
    const [best, ...others] = reached(lines, target, sign);
    const time = (at) => `${words(at, 3)} h`;
    const rest = others.map(({ name, at }) => (at < Infinity ? `${name} after ${time(at)}` : `${name} never`));
    this.first.textContent =
      best && best.at < Infinity
        ? `${best.name} reaches ${words(target)} (${label}) first, after ${time(best.at)}${rest.length ? `; ${rest.join(", ")}` : ""}.`
        : `No line reaches ${words(target)} (${label}).`;
  }
}
