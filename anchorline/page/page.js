"use strict";
// Conveniences. Without them a page says the same.

// Click on a heading: the largest number (or the first word) on top, then the reverse, then the order as it was.
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], original = [...body.rows];
  heads.forEach((head, column) => {
    const numeric = head.classList.contains("n"), ways = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
    const key = (row) => (numeric ? value(row.cells[column]) : row.cells[column].textContent);
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

// A cell's number: with every digit where it is given, else as it is shown. Nothing is least; what is not a number is most.
function value(cell) {
  const text = cell.dataset.value ?? cell.textContent.trim();
  if (text === "") return -Infinity;
  return Number.isNaN(Number(text)) ? Infinity : Number(text);
}

// What a cell's title says, at once and for the keyboard too: arrows move within a heat map.
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);

function show(cell) {
  if (cell.title) {
    cell.dataset.tip = cell.title;
    cell.removeAttribute("title");
  }
  if (!cell.dataset.tip) return hide();
  const table = cell.closest("table"), row = cell.parentElement.querySelector("th");
  const layer = table.matches(".heat") && row ? `layer ${row.textContent.trim()}, ` : "";
  const heading = table.tHead.rows[0].cells[cell.cellIndex].textContent.trim();
  tip.textContent = `${layer}${heading}: ${cell.textContent.trim()}\n${cell.dataset.tip}`;
  tip.hidden = false;
  const at = cell.getBoundingClientRect(), size = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${at.bottom + size.height + 8 < innerHeight ? at.bottom + 6 : at.top - size.height - 6}px`;
  cell.setAttribute("aria-describedby", "tip");
}

function hide() {
  tip.hidden = true;
}

const cellOf = (event) => event.target.closest?.("td[title], td[data-tip]");
document.addEventListener("pointerover", (event) => (cellOf(event) ? show(cellOf(event)) : hide()));
document.addEventListener("focusin", (event) => (cellOf(event) ? show(cellOf(event)) : hide()));
document.addEventListener("scroll", hide, true);
for (const table of document.querySelectorAll("table.heat")) table.querySelector("td[title]")?.setAttribute("tabindex", "0");
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return hide();
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const cell = document.activeElement.closest?.(".heat td");
  if (!step || !cell) return;
  const row = cell.closest("tbody").rows[cell.parentElement.sectionRowIndex + step[0]];
  const next = row?.cells[cell.cellIndex + step[1]];
  if (!next?.matches("td[title], td[data-tip]")) return;
  event.preventDefault();
  cell.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
  show(next);
});

// Commands are copied, or selected where a page may not copy.
for (const box of document.querySelectorAll(".command")) {
  const button = document.createElement("button"), code = box.querySelector("code");
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "selected";
    }
    setTimeout(() => (button.textContent = "copy"), 2000);
  });
  box.append(button);
}

// A link to what is closed opens it; paper shows every case.
function open() {
  const target = document.getElementById(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) {
    target.open = true;
    target.scrollIntoView();
  }
}
addEventListener("hashchange", open);
document.addEventListener("click", (event) => event.target.closest?.('a[href^="#"]')?.hash === location.hash && open());
open();

let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll(".case:not([open])")];
  closed.forEach((each) => (each.open = true));
});
addEventListener("afterprint", () => closed.forEach((each) => (each.open = false)));
