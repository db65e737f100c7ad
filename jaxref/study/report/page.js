"use strict";
// A convenience; without it the page says the same. Click on a heading: the largest on top, then the reverse, then as it was.
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], original = [...body.rows];
  heads.forEach((head, column) => {
    const numeric = head.classList.contains("n"), ways = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
    const key = (row) => (numeric ? Number(row.cells[column].dataset.value ?? -Infinity) : row.cells[column].textContent);
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const way = ways[ways.indexOf(head.ariaSort) + 1], sign = way === "ascending" ? 1 : -1;
      heads.forEach((other) => (other.ariaSort = null));
      head.ariaSort = way ?? null;
      const keyed = original.map((row) => [key(row), row]);
      if (way) keyed.sort(([a], [b]) => sign * (numeric ? (a > b) - (a < b) : a.localeCompare(b, "en", { numeric: true })));
      body.append(...keyed.map(([, row]) => row));
    });
  });
}
