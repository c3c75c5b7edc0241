"use strict";
// A layout on the mesh: the ranks as a grid, and the tensor, of which a rank's part is filled.

const MOST_RANKS = 4096;

// Which rank holds which part; pointing at a rank tells.
function onMesh(layout, stage) {
  const axes = Object.entries(stage.mesh).filter(([, size]) => size > 1);
  const count = axes.reduce((product, [, size]) => product * size, 1);
  if (count > MOST_RANKS) {
    return make("p", { class: "quiet" }, `${count} ranks: too many to draw`);
  }
  const words = make("p", { class: "quiet" });
  const grid = rankGrid(axes, count);
  const tensor = tensorOf(layout);
  const parts = [...Array(count).keys()].map((rank) => partOf(layout, axes, rank));
  const different = [...new Set(parts.map((part) => part.id))];
  const tell = (rank) => {
    grid.cells.forEach((cell, other) => cell.classList.toggle("same", parts[other].id === parts[rank].id));
    tensor.fill(parts[rank]);
    words.textContent = holding(rank, parts, layout, stage);
  };
  grid.cells.forEach((cell, rank) => {
    cell.style.fill = shade(different.indexOf(parts[rank].id), different.length);
    cell.addEventListener("pointerenter", () => tell(rank));
    cell.addEventListener("click", () => tell(rank));
  });
  tell(0);
  return make("div", {}, make("div", { class: "mesh" }, grid.svg, tensor.svg), words);
}

function holding(rank, parts, layout, stage) {
  const { id, words, where } = parts[rank];
  const same = parts.filter((part) => part.id === id).length;
  const others = same === 1 ? "" : same === parts.length ? ", as all ranks do" : `, as ${same} ranks do`;
  const pending = layout.partial.map(([axis, op]) =>
    op === "routed"
      ? ` Rows count on their rank of ${axis}.`
      : ` Values are still to be reduced (${op}) over ${axis}.`,
  );
  const whose = stage.several ? ` of the stage` : "";
  return `Rank ${rank}${whose}${where && ` (${where})`} holds ${words}${others}.${pending.join("")}`;
}

// What a rank holds of each dim.
function partOf(layout, axes, rank) {
  const at = {};
  let rest = rank;
  for (const [name, size] of [...axes].reverse()) {
    at[name] = rest % size;
    rest = Math.floor(rest / size);
  }
  const sizes = Object.fromEntries(axes);
  const spans = layout.dims.map((dim) => {
    const index = dim.axes.reduce((sum, axis) => sum * (sizes[axis] ?? 1) + (at[axis] ?? 0), 0);
    return dim.axes.length ? dim.spans[index] : [0, dim.length];
  });
  const words = spans.map(([low, high], i) => (layout.dims[i].axes.length ? `${low}:${high}` : ":"));
  return {
    id: spans.join(),
    spans,
    words: layout.dims.some((dim) => dim.axes.length) ? `[${words.join(", ")}]` : "all of it",
    where: axes.map(([name]) => `${name}=${at[name]}`).join(", "),
  };
}

// The last axis runs downwards where it is the shorter one, and to the right where it is not.
function rankGrid(axes, count) {
  const minor = axes.at(-1)?.[1] ?? 1;
  const turned = axes.length > 1 && minor * minor < count;
  const columns = axes.length < 2 ? Math.min(count, 16) : turned ? count / minor : minor;
  const rows = Math.ceil(count / columns);
  const side = Math.max(3, Math.min(18, 340 / columns, 200 / rows));
  const at = (rank) =>
    turned ? [Math.floor(rank / minor), rank % minor] : [rank % columns, Math.floor(rank / columns)];
  const cells = [...Array(count).keys()]
    .map(at)
    .map(([x, y]) =>
      draw("rect", { class: "rank", x: x * side, y: 14 + y * side, width: side, height: side }),
    );
  const label = axes.map(([name, size]) => `${name}=${size}`).join(" × ") || "one rank";
  const width = Math.max(columns * side, 60, 7 * label.length);
  const svg = draw("svg", { width, height: 16 + rows * side }, draw("text", { x: 0, y: 9 }, label), ...cells);
  return { svg, cells };
}

// Of a tensor's dims two are drawn: those that are split, then the longest.
function drawnDims(dims) {
  const order = [...dims.keys()].sort(
    (a, b) => dims[b].axes.length - dims[a].axes.length || dims[b].length - dims[a].length,
  );
  const shown = order.slice(0, 2).sort((a, b) => a - b);
  return shown.length === 2 ? shown : [undefined, shown[0]];
}

function tensorOf({ dims }) {
  const [down, across] = drawnDims(dims);
  const width = across === undefined ? 22 : 130;
  const height = down === undefined ? 22 : 96;
  const name = (dim) =>
    dim === undefined ? "" : `${dims[dim].length}${dims[dim].axes.map((axis) => `@${axis}`).join("")}`;
  // Where a position of a dim is drawn, of so many pixels.
  const place = (dim, at, pixels) => Math.max(0, Math.min(1, at / Math.max(1, dims[dim].length))) * pixels;
  const cuts = (dim, pixels, line) => {
    const spans = dim === undefined ? [] : dims[dim].spans.slice(1);
    return spans.length < 64 ? spans.map(([low]) => line(place(dim, low, pixels))) : [];
  };
  const part = draw("rect", { class: "part" });
  const svg = draw(
    "svg",
    { width: width + 12 + 7 * name(down).length, height: height + 18 },
    draw("text", { x: 0, y: 9 }, name(across) || "a scalar"),
    draw("text", { x: width + 5, y: 17 + height / 2 }, name(down)),
    part,
    ...cuts(across, width, (x) => draw("line", { class: "cut", x1: x, x2: x, y1: 14, y2: 14 + height })),
    ...cuts(down, height, (y) => draw("line", { class: "cut", x1: 0, x2: width, y1: 14 + y, y2: 14 + y })),
    draw("rect", { class: "whole", x: 0.5, y: 14.5, width: width - 1, height: height - 1 }),
  );
  const range = (dim, pixels, spans) => {
    if (dim === undefined) {
      return [0, pixels];
    }
    const [start, end] = spans[dim].map((at) => place(dim, at, pixels));
    return [Math.min(start, pixels - 2.5), Math.max(2.5, end - start)];
  };
  const fill = ({ spans }) => {
    const [x, wide] = range(across, width, spans);
    const [y, tall] = range(down, height, spans);
    for (const [key, value] of Object.entries({ x, y: 14 + y, width: wide, height: tall })) {
      part.setAttribute(key, value);
    }
  };
  return { svg, fill };
}

// Parts have shades of one ramp; where all ranks hold the same there is but one.
function shade(place, count) {
  const share = count < 2 ? 0 : place / (count - 1);
  return `hsl(${225 - 60 * share} ${60 - 15 * share}% ${62 + 16 * (place % 2) - 10 * share}%)`;
}
