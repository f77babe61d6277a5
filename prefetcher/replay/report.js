"use strict";
(function () {
  var root = document.documentElement;
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var chosen = null;

  function painted(value, style) {
    if (typeof value === "string") {
      return value.charAt(0) === "@" ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
    }
    if (Array.isArray(value)) return value.map(function (v) { return painted(v, style); });
    if (value && typeof value === "object") {
      var copy = {};
      Object.keys(value).forEach(function (k) { copy[k] = painted(value[k], style); });
      return copy;
    }
    return value;
  }

  function draw() {
    root.dataset.theme = chosen || (dark.matches ? "dark" : "light");
    var style = getComputedStyle(root);
    var base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: false,
      margin: { l: 62, r: 18, t: 22, b: 58 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "@soft" },
      hoverlabel: { bgcolor: "@card", bordercolor: "@line", font: { color: "@ink", size: 13 }, align: "left" }
    };
    Object.keys(figures).forEach(function (key) {
      var figure = figures[key], at = document.getElementById("chart-" + key);
      var layout = painted(Object.assign({}, base, figure.layout), style);
      if (!figure.layout.height) layout.height = window.innerWidth < 720 ? 360 : 440;
      layout.width = parseFloat(getComputedStyle(at).width);
      Plotly.react(at, painted(figure.data, style), layout, { displayModeBar: false });
    });
  }

  // Not Plotly's own way to follow a window: it takes a chart's height from its box then, and drops the figure's.
  var width = window.innerWidth, asked = 0;
  window.addEventListener("resize", function () {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(draw);
  });
  dark.addEventListener("change", draw);
  document.getElementById("theme").addEventListener("click", function () {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    draw();
  });
  draw();
})();
