// Tables: sorted by a click on a heading, searched, and marked where they go on beyond the edge.

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
const sortable = (table) => {
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
};

// A shadow at the side on which a table goes on, and a line that says so.
const scrolls = (box) => {
  const hint = html("p", { class: "hint" }, "Scroll sideways to see all columns →");
  box.before(hint);
  const look = () => {
    const rest = box.scrollWidth - box.clientWidth;
    hint.hidden = rest <= 1;
    box.classList.toggle("more-right", box.scrollLeft < rest - 1);
    box.classList.toggle("more-left", box.scrollLeft > 1);
  };
  box.addEventListener("scroll", look);
  new ResizeObserver(look).observe(box);
  look();
};

// The search of a section keeps the rows, in all its tables, that have every word.
const searchable = (section, prefix) => {
  const box = section.querySelector(".find");
  if (!box) return;
  const [input, count] = [box.querySelector("input"), box.querySelector("output")];
  const find = () => {
    const wanted = (view().get(`${prefix}q`) ?? "").toLowerCase();
    if (input.value.toLowerCase() !== wanted) input.value = wanted;
    const parts = wanted.split(/\s+/).filter(Boolean);
    const rows = [...section.querySelectorAll("tbody tr")];
    for (const row of rows) row.hidden = !parts.every((part) => row.textContent.toLowerCase().includes(part));
    const first = rows.filter((row) => row.closest("table") === section.querySelector("table"));
    count.textContent = parts.length ? `${first.filter((row) => !row.hidden).length} of ${first.length} rows` : "";
  };
  input.addEventListener("input", () => { setView({ [`${prefix}q`]: input.value || null }, true); find(); });
  shown.push(find);
  find();
};
