// What the theme leaves out, on every page.
document.addEventListener("DOMContentLoaded", () => {
  // A landmark for the sidebar, and a name for each arrow in it that opens a part.
  const sidebar = document.querySelector(".bd-sidebar-primary");
  sidebar?.setAttribute("role", "region");
  sidebar?.setAttribute("aria-label", "Book");
  for (const summary of document.querySelectorAll(".bd-sidebar-primary details > summary")) {
    const part = summary.closest("li")?.querySelector("a")?.textContent.trim();
    summary.setAttribute("aria-label", `Pages under ${part}`);
  }
});

// What scrolls sideways can be scrolled with the keyboard.
const SCROLLERS = ".memlab-figure, div.memlab-table, .pst-scrollable-table-container, .cell_output, article pre";
function focusScrollers() {
  for (const box of document.querySelectorAll(SCROLLERS)) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
window.addEventListener("load", focusScrollers);
window.addEventListener("resize", focusScrollers);
document.addEventListener("toggle", focusScrollers, true);

// Paper is light and has no arrow to press: what is folded is printed, but for the numbers of a figure and the bodies of
// recorded runs.
const restore = [];
window.addEventListener("beforeprint", () => {
  const page = document.documentElement;
  const theme = page.dataset.theme;
  page.dataset.theme = "light";
  restore.push(() => (page.dataset.theme = theme));
  const folded = "article details:not([open], .memlab-figure details, [data-run])";
  for (const details of document.querySelectorAll(folded)) {
    details.open = true;
    restore.push(() => (details.open = false));
  }
  for (const answer of document.querySelectorAll("article .admonition.toggle-hidden")) {
    answer.classList.remove("toggle-hidden");
    restore.push(() => answer.classList.add("toggle-hidden"));
  }
});
window.addEventListener("afterprint", () => {
  for (const undo of restore.splice(0)) undo();
});
