"use strict";
// The graph of one phase, folded by module. dagre places what is unfolded, and no more.

const FONTS = {
  title: "600 12px system-ui, sans-serif",
  quiet: "11px system-ui, sans-serif",
  chip: "11px system-ui, sans-serif",
  code: "11px ui-monospace, Menlo, Consolas, monospace",
  held: "11px ui-monospace, Menlo, Consolas, monospace",
};
const WIDEST = 300,
  LINE = 16,
  PAD = 10,
  HEAD = 26;
const OPENING = 18; // boxes up to which modules are unfolded when the page opens

const pen = document.createElement("canvas").getContext("2d");
function widthOf(text, kind) {
  pen.font = FONTS[kind];
  return pen.measureText(text).width * 1.03;
}

function shortened(text, kind, room) {
  if (widthOf(text, kind) <= room) {
    return text;
  }
  let low = 0,
    high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (widthOf(`${text.slice(0, middle)}…`, kind) <= room) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return `${text.slice(0, low)}…`;
}

class GraphView {
  // chosen(key): told of what is clicked.
  constructor(root, chosen) {
    this.chosen = chosen;
    this.phase = "forward";
    this.svg = draw("svg", { role: "application", "aria-label": "Graph of the plan" });
    this.layer = draw("g");
    this.svg.append(this.layer);
    this.phases = make("div", { class: "switch", role: "group", "aria-label": "Phase" });
    for (const phase of ["forward", "backward"]) {
      this.phases.append(make("button", { type: "button", onclick: () => this.setPhase(phase) }, phase));
    }
    this.name = make("span", { class: "name" });
    root.append(
      make(
        "div",
        { class: "strip" },
        this.name,
        this.phases,
        make("span", { class: "grow" }),
        make("button", { type: "button", onclick: () => this.foldAll() }, "Fold"),
        make("button", { type: "button", onclick: () => this.fit(), title: "f" }, "Fit"),
      ),
      this.svg,
    );
    this.view = { x: 0, y: 0, scale: 1 };
    this.kept = "look";
    this._listen();
    new ResizeObserver(() => this._resized()).observe(this.svg);
  }

  show(stage, name) {
    this.stage = stage;
    this.name.textContent = name;
    this.open = new Set([""]);
    this._openFirst();
    this.phases.hidden = !stage.nodes.some((node) => node.kind === "op" && node.phase === "backward");
    this.setPhase(stage.nodes.some((node) => node.phase === this.phase) ? this.phase : "forward");
  }

  setPhase(phase) {
    this.phase = phase;
    for (const button of this.phases.children) {
      button.setAttribute("aria-pressed", String(button.textContent === phase));
    }
    this.render();
    this.look();
  }

  foldAll() {
    this.open = new Set([""]);
    this.render();
    this.look();
  }

  // Modules are unfolded from the outside in, but for layers that are repeated, while few boxes are seen.
  _openFirst() {
    const queue = [...this.stage.root.inner.values()];
    let count = queue.length + this.stage.root.nodes.filter((node) => DRAWN.has(node.kind)).length;
    while (queue.length) {
      const module = queue.shift();
      const more = module.inner.size + module.nodes.filter((node) => DRAWN.has(node.kind)).length / 2;
      if (!module.inner.size || module.repeat > 1 || count + more > OPENING) {
        continue;
      }
      this.open.add(module.path);
      count += more;
      queue.push(...module.inner.values());
    }
  }

  toggle(key) {
    const module = this.stage.byKey.get(key);
    if (!(module instanceof Module)) {
      return;
    }
    const before = this.boxes.get(key);
    if (this.open.has(module.path)) {
      this.open.delete(module.path);
    } else {
      this.open.add(module.path);
    }
    this.render();
    const after = this.boxes.get(key);
    if (before && after) {
      // What was clicked stays where it is.
      this.view.x += (before.x - after.x) * this.view.scale;
      this.view.y += (before.y - before.height / 2 - after.y + after.height / 2) * this.view.scale;
      this._move();
    }
    this._keepInSight(key);
  }

  // Unfolds what is around it, and brings it into sight.
  reveal(key) {
    let found = this.stage.byKey.get(key);
    if (!found) {
      return;
    }
    if (!(found instanceof Module)) {
      found = this.stage.shownAs(found);
      if (!found) {
        return;
      }
      if (found.phase !== this.phase) {
        this.setPhase(found.phase);
      }
    }
    for (let module = found instanceof Module ? found.parent : found.home; module; module = module.parent) {
      this.open.add(module.path);
    }
    this.render();
    this._keepInSight(found.key);
  }

  // The box in which the graph as it is unfolded shows a node; null where the other phase does.
  _boxOf(node) {
    if (!DRAWN.has(node.kind) || node.phase !== this.phase) {
      return null;
    }
    let outermost = null;
    for (let module = node.home; module; module = module.parent) {
      if (!this.open.has(module.path)) {
        outermost = module;
      }
    }
    return (outermost ?? node).key;
  }

  select(key) {
    const found = this.stage.byKey.get(key);
    const shown = found instanceof Module || !found ? found : this.stage.shownAs(found);
    this.selected = shown ? shown.key : null;
    for (const element of this.layer.querySelectorAll("[data-key]")) {
      element.classList.toggle("selected", element.dataset.key === this.selected);
    }
    for (const edge of this.drawn ?? []) {
      edge.element.classList.toggle(
        "near",
        edge.ends.has(this.selected) || edge.from === this.selected || edge.to === this.selected,
      );
    }
  }

  render() {
    const parts = this._parts();
    this.boxes = new Map();
    this.drawn = [];
    const levels = this._levels(parts);
    const whole = parts.size
      ? this._arranged(this.stage.root, levels)
      : { width: 1, height: 1, items: [], edges: [] };
    this._placed(whole, 0, 0);
    this.extent = whole;
    const clusters = [...this.boxes]
      .filter(([, box]) => !box.part)
      .map(([key, box]) => this._cluster(key, box));
    const boxes = [...this.boxes].filter(([, box]) => box.part).map(([key, box]) => this._box(key, box));
    this.layer.replaceChildren(...clusters, ...this.drawn.map((edge) => this._edge(edge)), ...boxes);
    this.layer.setAttribute("class", this.phase);
    if (!parts.size) {
      this.layer.append(draw("text", { class: "quiet", x: 12, y: 60 }, `The plan has no ${this.phase}.`));
    }
    this.select(this.selected);
    this._move();
  }

  // Of every unfolded module what is in it: boxes and unfolded modules, and the edges between these.
  _levels(parts) {
    const levels = new Map(),
      paths = new Map();
    const level = (module) => {
      if (!levels.has(module.key)) {
        levels.set(module.key, { items: new Map(), edges: new Map() });
      }
      return levels.get(module.key);
    };
    for (const [key, part] of parts) {
      let child = { key, part },
        path = [key];
      for (
        let module = part.found instanceof Module ? part.found.parent : part.found.home;
        module;
        module = module.parent
      ) {
        level(module).items.set(child.key, child);
        child = { key: module.key, module };
        path.unshift(module.key);
      }
      paths.set(key, path);
    }
    for (const edge of this._edges(parts)) {
      const [from, to] = [paths.get(edge.from), paths.get(edge.to)];
      let depth = 0;
      while (from[depth] === to[depth]) {
        depth += 1;
      }
      const { edges } = levels.get(from[depth - 1]),
        id = `${from[depth]}\n${to[depth]}`;
      if (!edges.has(id)) {
        edges.set(id, { from: from[depth], to: to[depth], kind: null, ends: new Set() });
      }
      edges.get(id).kind ??= edge.kind;
      edges.get(id).ends.add(edge.from).add(edge.to);
    }
    return levels;
  }

  // A module with all that is unfolded in it: dagre places one level, on which inner modules are boxes as large as they are.
  _arranged(module, levels) {
    const { items, edges } = levels.get(module.key),
      graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 30, edgesep: 10, marginx: 12, marginy: 12 });
    for (const [key, item] of items) {
      const inner = item.part ? this._size(item.part) : this._arranged(item.module, levels);
      graph.setNode(key, { ...item, ...inner });
    }
    for (const edge of edges.values()) {
      graph.setEdge(edge.from, edge.to, { ...edge });
    }
    dagre.layout(graph);
    const { width, height } = graph.graph(),
      head = module.path ? HEAD - 6 : 0;
    const least = module.path ? widthOf(this._title(module), "title") + 3 * PAD : 0;
    return {
      width: Math.max(width, least),
      height: height + head,
      head,
      module,
      inside: graph.nodes().map((key) => [key, graph.node(key)]),
      edges: graph.edges().map((edge) => graph.edge(edge)),
    };
  }

  // In coordinates of the whole. left, top: of the module.
  _placed({ inside = [], edges, head = 0 }, left, top) {
    for (const [key, item] of inside) {
      const box = { ...item, x: left + item.x, y: top + head + item.y };
      this.boxes.set(key, box);
      if (!item.part) {
        this._placed(item, box.x - box.width / 2, box.y - box.height / 2);
      }
    }
    for (const edge of edges) {
      this.drawn.push({
        ...edge,
        points: edge.points.map(({ x, y }) => ({ x: left + x, y: top + head + y })),
      });
    }
  }

  _title(module) {
    return `− ${module.title}${module.repeat > 1 ? `  ×${module.repeat}` : ""}`;
  }

  // What is drawn: by key, the nodes of a folded module, or the one of an op.
  _parts() {
    const parts = new Map();
    for (const node of this.stage.nodes) {
      const key = this._boxOf(node);
      if (!key) {
        continue;
      }
      if (!parts.has(key)) {
        parts.set(key, { key, found: this.stage.byKey.get(key), nodes: [] });
      }
      parts.get(key).nodes.push(node);
    }
    for (const part of parts.values()) {
      part.lines = this._lines(part);
    }
    return parts;
  }

  _edges(parts) {
    const found = new Map();
    for (const part of parts.values()) {
      for (const node of part.nodes) {
        for (const edge of node.reads) {
          const from = this._boxOf(edge.source);
          if (!from || from === part.key) {
            continue;
          }
          const id = `${from}\n${part.key}`;
          if (!found.has(id)) {
            found.set(id, { from, to: part.key, kind: null });
          }
          found.get(id).kind ??= edge.moved[0]?.kind ?? null;
        }
      }
    }
    return found.values();
  }

  // Lines of a box: kind, text, and what stands at its right.
  _lines({ found, nodes }) {
    const repeat = (node) => node.repeat ?? 1;
    const time = nodes.reduce((sum, node) => sum + repeat(node) * node.seconds, 0);
    const lines = [];
    if (found instanceof Module) {
      const times = found.repeat > 1 ? `${found.repeat} equal layers · ` : "";
      const ops = nodes.filter((node) => node.kind === "op").length;
      lines.push({ kind: "title", text: found.title, right: time > 1e-9 ? seconds(time) : "" });
      lines.push({
        kind: "quiet",
        text: `${times}${ops} ${ops === 1 ? "op" : "ops"}${times ? " each" : ""}`,
      });
    } else {
      const given = found.kind === "input" || found.kind === "tangent";
      const title = given ? `${found.kind} ${found.label.replace(/^(tangent|input) /, "")}` : titleOf(found);
      lines.push({ kind: "title", text: title, right: time > 1e-9 ? seconds(time) : "" });
      for (const layout of found.results.slice(0, 2)) {
        lines.push({ kind: "code", text: layout });
      }
      for (const { source } of found.reads.filter(({ source }) => !DRAWN.has(source.kind)).slice(0, 3)) {
        lines.push({ kind: "held", text: `${last(source.label)} ${source.results[0]}` });
      }
    }
    const moved = totals(nodes.flatMap(transfersOf));
    for (const sum of moved.slice(0, 4)) {
      lines.push({
        kind: "chip",
        text: sum.count > 1 ? `${sum.key} ×${sum.count}` : sum.key,
        right: seconds(sum.seconds),
        colour: colourOf(sum.kind),
      });
    }
    if (moved.length > 4) {
      lines.push({ kind: "quiet", text: `and ${moved.length - 4} more kinds of transfers` });
    }
    return lines;
  }

  _size({ lines }) {
    const wide = (line) =>
      widthOf(line.text, line.kind) +
      (line.colour ? 14 : 0) +
      (line.right ? 14 + widthOf(line.right, "quiet") : 0);
    return {
      width: Math.min(WIDEST, Math.max(90, ...lines.map(wide)) + 2 * PAD),
      height: lines.length * LINE + 2 * PAD - 4,
    };
  }

  _box(key, box) {
    const left = box.x - box.width / 2,
      top = box.y - box.height / 2;
    const folded = box.part.found instanceof Module;
    const element = draw("g", {
      class: folded ? "box folded" : "box",
      "data-key": key,
      transform: `translate(${left} ${top})`,
    });
    if (folded && box.part.found.repeat > 1) {
      element.append(
        draw("rect", { class: "stack", x: 4, y: 4, width: box.width, height: box.height, rx: 6 }),
      );
    }
    element.append(draw("rect", { width: box.width, height: box.height, rx: 6 }));
    box.part.lines.forEach((line, row) => this._line(element, line, PAD + row * LINE + 9, box.width));
    element.addEventListener("click", () => this._clicked(key, folded));
    return element;
  }

  _line(element, line, y, width) {
    const indent = line.colour ? 14 : 0;
    const room = width - 2 * PAD - indent - (line.right ? widthOf(line.right, "quiet") + 8 : 0);
    if (line.colour) {
      element.append(
        draw("rect", {
          x: PAD,
          y: y - 8,
          width: 8,
          height: 8,
          rx: 2,
          style: `fill:${line.colour};stroke:none`,
        }),
      );
    }
    element.append(
      draw("text", { class: line.kind, x: PAD + indent, y }, shortened(line.text, line.kind, room + 1)),
    );
    if (line.right) {
      element.append(draw("text", { class: "quiet", x: width - PAD, y, "text-anchor": "end" }, line.right));
    }
  }

  _cluster(key, box) {
    const left = box.x - box.width / 2,
      top = box.y - box.height / 2;
    const { module } = box;
    const element = draw("g", { class: "cluster", "data-key": key });
    const head = draw(
      "g",
      { class: "head" },
      draw("rect", { x: left, y: top, width: box.width, height: HEAD, fill: "transparent" }),
      draw(
        "text",
        { class: "title", x: left + PAD, y: top + 17 },
        shortened(this._title(module), "title", box.width - 2 * PAD),
      ),
    );
    head.addEventListener("click", () => this._clicked(key, true));
    element.append(
      head,
      draw("rect", { class: "frame", x: left, y: top, width: box.width, height: box.height, rx: 8 }),
    );
    return element;
  }

  _clicked(key, unfolds) {
    if (this.dragged) {
      return;
    }
    this.chosen(key);
    if (unfolds) {
      this.toggle(key);
    }
  }

  _edge(edge) {
    const { points } = edge;
    let path = `M${points[0].x} ${points[0].y}`;
    for (let i = 1; i < points.length; i += 1) {
      const [a, b] = [points[i - 1], points[i]],
        middle = (a.y + b.y) / 2;
      path += ` C${a.x} ${middle} ${b.x} ${middle} ${b.x} ${b.y}`;
    }
    const colour = edge.kind ? `stroke:${colourOf(edge.kind)}` : "";
    const element = draw("path", { class: edge.kind ? "edge moves" : "edge", d: path, style: colour });
    edge.element = element;
    return element;
  }

  // The nearest box in a direction: what arrow keys go to.
  neighbour(key) {
    const own = this.boxes.get(this.selected);
    const [dx, dy] = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[key];
    let best = null,
      least = Infinity;
    for (const [other, box] of this.boxes) {
      if (!box.part || other === this.selected) {
        continue;
      }
      if (!own) {
        return other;
      }
      const x = box.x - own.x,
        y = box.y - own.y;
      const along = x * dx + y * dy,
        aside = Math.abs(x * dy) + Math.abs(y * dx);
      if (along > 4 && along + 2 * aside < least) {
        least = along + 2 * aside;
        best = other;
      }
    }
    return best;
  }

  // The whole, or its beginning where the whole could not be read.
  look() {
    this.fit();
    const { clientWidth: width } = this.svg,
      least = 0.62;
    if (!width || this.view.scale >= least) {
      this.kept = "look";
      return;
    }
    const first = [...this.boxes.values()].filter((box) => box.part).reduce((a, b) => (b.y < a.y ? b : a));
    const inside = Math.max(width - least * this.extent.width, Math.min(0, width / 2 - least * first.x));
    this.view = {
      scale: least,
      x: least * this.extent.width < width ? (width - least * this.extent.width) / 2 : inside,
      y: 44,
    };
    this._move();
    this.kept = "look";
  }

  fit() {
    const { clientWidth: width, clientHeight: height } = this.svg;
    if (!width || !this.extent) {
      return;
    }
    const top = 44,
      scale = Math.min(1.25, width / this.extent.width, (height - top) / this.extent.height);
    this.view = {
      scale,
      x: (width - scale * this.extent.width) / 2,
      y: top + Math.max(0, (height - top - scale * this.extent.height) / 2),
    };
    this._move();
    this.kept = "fit";
  }

  // What is seen whole stays so, unless it was moved.
  _resized() {
    if (this.kept) {
      this[this.kept]();
    }
  }

  _move() {
    this.kept = null;
    const { x, y, scale } = this.view;
    this.layer.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
  }

  _keepInSight(key) {
    const box = this.boxes.get(key),
      { clientWidth: width, clientHeight: height } = this.svg;
    if (!box || !width) {
      return;
    }
    // What is too small to be read is brought nearer.
    if (this.view.scale < 0.6) {
      this._zoom(0.9 / this.view.scale, width / 2, height / 2);
    }
    const { scale } = this.view;
    const inside = (at, size, length, margin, before) => {
      const low = at * scale + before - (size * scale) / 2,
        high = low + size * scale;
      if (low < margin) {
        return before + margin - low;
      }
      return high > length - 20 ? before - Math.min(high - length + 20, low - margin) : before;
    };
    this.view.x = inside(box.x, box.width, width, 20, this.view.x);
    this.view.y = inside(box.y, box.height, height, 52, this.view.y);
    this._move();
  }

  _zoom(factor, x, y) {
    const scale = Math.max(0.03, Math.min(4, this.view.scale * factor)),
      by = scale / this.view.scale;
    this.view = { scale, x: x + (this.view.x - x) * by, y: y + (this.view.y - y) * by };
    this._move();
  }

  _listen() {
    const held = new Map();
    const at = (event) => {
      const { left, top } = this.svg.getBoundingClientRect();
      return { x: event.clientX - left, y: event.clientY - top };
    };
    const spread = () => {
      const [a, b] = held.values();
      return Math.hypot(a.x - b.x, a.y - b.y);
    };
    this.svg.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const { x, y } = at(event);
        this._zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) * 0.004), x, y);
      },
      { passive: false },
    );
    this.svg.addEventListener("pointerdown", (event) => {
      held.set(event.pointerId, at(event));
      this.dragged = false;
    });
    this.svg.addEventListener("pointermove", (event) => {
      const before = held.get(event.pointerId),
        now = at(event);
      if (!before) {
        return;
      }
      // A press that hardly moves is a click.
      if (!this.dragged && Math.hypot(now.x - before.x, now.y - before.y) < 4) {
        return;
      }
      if (!this.dragged) {
        this.dragged = true;
        this.svg.setPointerCapture(event.pointerId);
        this.svg.classList.add("panning");
      }
      const apart = held.size === 2 ? spread() : 0;
      held.set(event.pointerId, now);
      if (apart) {
        this._zoom(spread() / apart, now.x, now.y);
        return;
      }
      this.view.x += now.x - before.x;
      this.view.y += now.y - before.y;
      this._move();
    });
    for (const end of ["pointerup", "pointercancel"]) {
      this.svg.addEventListener(end, (event) => {
        held.delete(event.pointerId);
        this.svg.classList.remove("panning");
      });
    }
  }
}
