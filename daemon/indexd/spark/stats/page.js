"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const style = () => getComputedStyle(document.documentElement);

  // A text that names one of the page's colours becomes that colour.
  const coloured = (value, css) => {
    if (typeof value === "string" && value.startsWith("--")) return css.getPropertyValue(value).trim();
    if (Array.isArray(value)) return value.map((one) => coloured(one, css));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, coloured(one, css)]));
    }
    return value;
  };

  // On a phone fewer words fit above a plot; the lines they stand for stay.
  const apart = (notes) => {
    const span = notes.length ? notes[notes.length - 1].x - notes[0].x : 0;
    let last = -Infinity;
    return notes.filter((note) => note.x - last >= span * 0.45 && (last = note.x));
  };

  const layoutOf = (plot, css, narrow) => {
    const axis = {
      automargin: true, color: css.getPropertyValue("--soft"), gridcolor: css.getPropertyValue("--grid"),
      zeroline: false, linecolor: css.getPropertyValue("--line"), title: {font: {size: 12}, standoff: 8},
    };
    const given = coloured(plot.layout, css);
    const merged = (mine) => ({...axis, ...mine, title: {...axis.title, ...(mine.title || {})}});
    const layout = {
      ...given,
      xaxis: {...merged(given.xaxis), gridcolor: "rgba(0,0,0,0)"},
      yaxis: {...merged(given.yaxis), fixedrange: true},
      height: plot.height + (narrow && given.legend ? 60 : 0),
      margin: {l: 8, r: 8, t: 24, b: 8},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {family: style().fontFamily || getComputedStyle(document.body).fontFamily, size: 12, color: css.getPropertyValue("--ink")},
      hoverlabel: {bgcolor: css.getPropertyValue("--card"), bordercolor: css.getPropertyValue("--line"), font: {color: css.getPropertyValue("--ink")}},
      showlegend: plot.data.length > 1,
    };
    if (narrow) {
      layout.yaxis.title = {text: ""};
      layout.annotations = apart(layout.annotations || []);
    }
    return layout;
  };

  const draw = () => {
    const css = style();
    for (const [id, plot] of Object.entries(plots)) {
      const place = document.getElementById(id);
      if (!place) continue;
      const narrow = place.clientWidth < 520;
      const settings = {displayModeBar: false, responsive: true, showTips: false};
      Plotly.react(place, coloured(plot.data, css), layoutOf(plot, css, narrow), settings);
    }
    document.documentElement.dataset.drawn = "yes";
  };

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
