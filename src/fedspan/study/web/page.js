// The page: themes and sections.

const shown = [];  // what is set again when the address changes
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

themed();
build();
