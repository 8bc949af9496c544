// The page: themes, sections, and following a run that goes on.

let shown = [];  // what is set again when the address changes
addEventListener("hashchange", () => shown.forEach((update) => update()));

const themed = () => {
  const button = document.querySelector(".theme");
  const root = document.documentElement;
  const kept = { get: () => { try { return localStorage.getItem("theme"); } catch { return null; } }, set: (v) => { try { localStorage.setItem("theme", v); } catch { /* a page that is a file may have no storage */ } } };
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const tell = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  if (kept.get()) root.dataset.theme = kept.get();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    kept.set(root.dataset.theme);
    tell();
  });
  tell();
};

const build = () => {
  shown = [];
  document.querySelectorAll("table").forEach(sortable);
  document.querySelectorAll(".scroll").forEach(scrolls);
  document.querySelectorAll("main > section.part").forEach((section, n) => {
    const number = n ? n + 1 : "";
    section.querySelectorAll("figure.chart").forEach((figure) => {
      const marks = figure.classList.contains("marks");
      const chart = new Chart(figure, `${marks ? "m" : ""}${number}${marks || number ? "." : ""}`);
      shown.push(() => chart.draw());
    });
    searchable(section, number ? `${number}.` : "");
  });
  document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", (event) => {
    event.preventDefault();  // the address belongs to the view
    document.getElementById(link.hash.slice(1)).scrollIntoView();
  }));
};

// A live page asks its server for news, and takes over what changed; the address keeps the view.
const follow = async (stamp) => {
  const status = document.querySelector(".live");
  let next = stamp;
  try {
    const answer = await (await fetch(`live.json?stamp=${encodeURIComponent(stamp)}`)).json();
    next = answer.stamp;
    if (answer.main !== undefined) swap(answer.main);
    status.textContent = answer.status;
  } catch {
    status.textContent = "The server has stopped; this is the last state.";
  }
  setTimeout(() => follow(next), 1500);
};
const swap = (text) => {
  const main = document.querySelector("main");
  const open = [...main.querySelectorAll("details")].map((one) => one.open);
  const focus = [...main.querySelectorAll("input, button, svg[tabindex]")].indexOf(document.activeElement);
  main.innerHTML = text;
  main.querySelectorAll("details").forEach((one, n) => { one.open = open[n] ?? one.open; });
  build();
  main.querySelectorAll("input, button, svg[tabindex]")[focus]?.focus({ preventScroll: true });
};

themed();
build();
if (document.body.dataset.live) follow(document.body.dataset.live);
