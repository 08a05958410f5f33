// Before RequireJS and the widgets: their modules and fonts come from the book itself, wherever it is served from.
(function () {
  var folder = document.currentScript.src.replace(/widgets\.js.*$/, "") + "vendor/html-manager";
  window.require = {
    paths: { "@jupyter-widgets": folder, "@jupyter-widgets/html-manager/dist": folder },
  };
  // html-manager typesets through MathJax 2, which a page with formulas does not have.
  window.addEventListener("load", function () {
    if (window.MathJax && !window.MathJax.Hub) window.MathJax.Hub = { Queue: function () {} };
  });
})();
