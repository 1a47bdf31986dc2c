// Elements and small drawings. Text is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
};

export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
export const percent = (value) => `${(100 * value).toFixed(3)}%`;

// Replaces the children only when they would be others: what is selected or pointed at stays so.
export const put = (place, ...children) => {
  const next = el("div", {}, ...children);
  if (next.innerHTML !== place.innerHTML) place.replaceChildren(...next.childNodes);
};

export const text = (place, words) => {
  if (place.textContent !== words) place.textContent = words;
};

// A curve of {at, value} over the last `span` ms before `now`; whatever is missing stays empty.
export const curve = (place, points, now, span) => {
  const width = place.clientWidth || 240;
  const height = place.clientHeight || 46;
  const shown = points.filter((point) => point.at >= now - span && point.value !== null);
  const highest = Math.max(...shown.map((point) => point.value), 1e-9);
  const x = (point) => (width * (1 - (now - point.at) / span)).toFixed(1);
  const y = (point) => (height - 2 - (height - 6) * Math.min(point.value / highest, 1)).toFixed(1);
  const line = shown.map((point, number) => `${number ? "L" : "M"}${x(point)},${y(point)}`).join("");
  const last = shown[shown.length - 1];
  const area = shown.length > 1 ? `${line}L${x(last)},${height}L${x(shown[0])},${height}Z` : "";
  let drawn = place.querySelector("svg");
  if (!drawn) {
    drawn = svg("svg", {class: "curve", "aria-hidden": "true"},
      svg("line", {class: "base"}), svg("path", {class: "area"}), svg("path", {class: "line"}), svg("circle", {class: "tip", r: 2.5}));
    place.replaceChildren(drawn);
  }
  const [base, areaPath, linePath, tip] = drawn.children;
  drawn.setAttribute("viewBox", `0 0 ${width} ${height}`);
  fill(base, {x1: 0, x2: width, y1: height - 1, y2: height - 1}, []);
  areaPath.setAttribute("d", area);
  linePath.setAttribute("d", line);
  tip.setAttribute("visibility", last ? "visible" : "hidden");
  if (last) fill(tip, {cx: Math.min(x(last), width - 3), cy: y(last)}, []);
  return shown.length ? highest : null;
};

// Stretches of the log: {begin, end, kind, words} with BigInt ends; thin ones are made visible, the rest gives way.
export const strip = (parts, holes, begin, end) => {
  const span = Number(end - begin) || 1;
  const shares = parts.map((part) => (part.end > part.begin ? Math.max(Number(part.end - part.begin) / span, 0.006) : 0));
  const sum = shares.reduce((a, b) => a + b, 0) || 1;
  let from = 0;
  const boxes = parts.map((part, number) => {
    const wide = shares[number] / sum;
    const box = wide ? svg("rect", {class: `part ${part.kind}`, x: percent(from), width: percent(wide), y: 0, height: 22},
      svg("title", {}, part.words)) : null;
    from += wide;
    return box;
  });
  const marks = holes.map((hole) => svg("rect", {
    class: "part hole", x: percent(Math.min(Math.max(Number(hole.begin - begin) / span, 0), 0.997)),
    width: percent(Math.max(Number(hole.end - hole.begin) / span, 0.003)), y: 0, height: 22,
  }, svg("title", {}, hole.words)));
  const words = [...parts, ...holes].filter((part) => part.end > part.begin).map((part) => part.words).join("; ");
  return svg("svg", {class: "strip", width: "100%", height: 22, role: "img", "aria-label": words}, boxes, marks);
};

// One upright bar a file, {ratio, words}.
export const bars = (files) => svg("svg", {class: "bars", width: "100%", height: 56, role: "img", "aria-label": `${files.length} files`},
  files.map((file, number) => {
    const x = percent(number / Math.max(files.length, 24));
    const width = percent(1 / Math.max(files.length, 24) - (files.length > 100 ? 0.0005 : 0.006));
    const height = Math.max(Math.round(56 * Math.min(file.ratio, 1)), 2);
    return svg("g", {}, svg("title", {}, file.words), svg("rect", {class: "empty", x, width, y: 0, height: 56, rx: 1}),
      svg("rect", {class: "full", x, width, y: 56 - height, height, rx: 1}));
  }));
