"use strict";
// What the page knows: the plans as data, modules as a tree, and how numbers are written.

function seconds(value) {
  for (const [scale, unit] of [
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "us"],
  ]) {
    if (value >= scale) {
      return `${Number((value / scale).toPrecision(3))} ${unit}`;
    }
  }
  return value > 1e-10 ? `${Number((value / 1e-9).toPrecision(3))} ns` : "0";
}

function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${Number(value.toPrecision(4))} ${units[unit]}`;
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

// A name that may be broken behind its dots.
const dotted = (name) => name.replaceAll(".", ".\u200b");

const last = (path) => path.slice(path.lastIndexOf(".") + 1);

const opName = (label) => label.replace(/^aten\./, "").split(".")[0];

const titleOf = (node) =>
  node.kind === "op" ? opName(node.label) : node.kind === "use" ? "redistribute" : node.label || node.kind;

// An element with attributes, and children or text. Text is never read as HTML: names come from models and files.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else if (value !== false && value != null) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A module: those in it, and the nodes that are in none of these. `key` names it in selections.
class Module {
  constructor(path, parent) {
    this.path = path;
    this.key = `m:${path}`;
    this.parent = parent;
    this.inner = new Map();
    this.nodes = [];
    this.repeat = 1;
  }

  *all() {
    yield* this.nodes;
    for (const module of this.inner.values()) {
      yield* module.all();
    }
  }

  // The name within what is drawn around it.
  get title() {
    return this.label ?? (this.parent?.path ? this.path.slice(this.parent.path.length + 1) : this.path);
  }

  get name() {
    return this.label ?? (this.path || "model");
  }
}

const LOOSE = 4; // ops beside modules from which on they are folded
const DRAWN = new Set(["op", "use", "input", "tangent"]);

// The graph of a plan, or of one of its stages.
class Stage {
  // several: whether it is one of many.
  constructor(data, number, several) {
    Object.assign(this, data, { number, several });
    this.byKey = new Map();
    this.nodes.forEach((node, place) =>
      Object.assign(node, { place, key: `n:${node.name}`, reads: [], readers: [] }),
    );
    for (const [source, reader, layout, moved] of this.edges) {
      const edge = { source: this.nodes[source], reader: this.nodes[reader], layout, moved };
      edge.source.readers.push(edge);
      edge.reader.reads.push(edge);
    }
    this.root = new Module("", null);
    for (const node of this.nodes) {
      this._place(node);
    }
    for (const module of [...this.root.inner.values()]) {
      this._shorten(module);
    }
    this._gather(this.root);
    this._index(this.root);
  }

  get suffix() {
    return this.several ? `, stage ${this.number}` : "";
  }

  _place(node) {
    this.byKey.set(node.key, node);
    let module = this.root,
      path = "";
    for (const name of node.module ? node.module.split(".") : []) {
      path = path ? `${path}.${name}` : name;
      if (!module.inner.has(name)) {
        module.inner.set(name, new Module(path, module));
      }
      module = module.inner.get(name);
    }
    node.home = module;
    module.nodes.push(node);
  }

  // A module that holds one module and nothing else is drawn as that one.
  _shorten(module) {
    while (module.inner.size === 1 && !module.nodes.length) {
      const [only] = module.inner.values();
      only.parent = module.parent;
      module.parent.inner.set(last(module.path), only);
      module = only;
    }
    for (const inner of [...module.inner.values()]) {
      this._shorten(inner);
    }
  }

  // Ops beside modules that read one another, such as those of a loss, are folded as if they were a module.
  _gather(module) {
    for (const inner of module.inner.values()) {
      this._gather(inner);
    }
    if (module.inner.size < 2) {
      return;
    }
    for (const group of this._together(
      module.nodes.filter((node) => node.kind === "op" || node.kind === "use"),
    )) {
      if (group.length < LOOSE) {
        continue;
      }
      const path = `${module.path}#${module.inner.size}`,
        made = new Module(path, module);
      const ops = [...new Set(group.map((node) => opName(node.label)))];
      made.label = `${module.path ? last(module.path) : "model"}: ${ops.slice(0, 3).join(", ")} …`;
      made.nodes = group;
      for (const node of group) {
        node.home = made;
      }
      module.inner.set(path, made);
      module.nodes = module.nodes.filter((node) => node.home !== made);
    }
  }

  // Of nodes those of a phase that read one another, in groups.
  _together(nodes) {
    const group = new Map(nodes.map((node) => [node, [node]]));
    for (const node of nodes) {
      for (const { source } of node.reads) {
        const one = group.get(node),
          other = group.get(source);
        if (!other || other === one || source.phase !== node.phase) {
          continue;
        }
        one.push(...other);
        for (const moved of other) {
          group.set(moved, one);
        }
      }
    }
    return new Set(group.values());
  }

  _index(module) {
    this.byKey.set(module.key, module);
    const own = [...module.all()];
    module.repeat = own.length ? Math.min(...own.map((node) => node.repeat ?? 1)) : 1;
    for (const inner of module.inner.values()) {
      this._index(inner);
    }
  }

  // The nodes that a selected key stands for, by their places: of a parameter and the like those that read it.
  places(key) {
    const found = this.byKey.get(key);
    if (!found) {
      return new Set();
    }
    const nodes =
      found instanceof Module
        ? [...found.all()]
        : DRAWN.has(found.kind)
          ? [found]
          : found.readers.map((edge) => edge.reader);
    return new Set(nodes.map((node) => node.place));
  }

  // Where a parameter or the like is drawn: in the first op that reads it.
  shownAs(node) {
    while (!DRAWN.has(node.kind)) {
      const next = node.kind === "output" ? node.reads[0]?.source : node.readers[0]?.reader;
      if (!next || (next.kind === "output" && node.kind !== "output")) {
        return null;
      }
      node = next;
    }
    return node;
  }

  // Key of what has that name in another table: a parameter, or a module. "layers.0-31.w" is that of any of them.
  named(name) {
    const many = name.split(".");
    const meets = (one, other) => {
      const [[a, b = a], [c, d = c]] = [one, other].map((part) => part.split("-").map(Number));
      return one === other || (a <= d && c <= b);
    };
    const same = (path) => {
      const one = path.split(".");
      return one.length === many.length && one.every((part, i) => meets(part, many[i]));
    };
    const node = this.nodes.find((one) => one.kind !== "op" && same(one.label));
    return node
      ? node.key
      : ([...this.byKey.keys()].find((key) => key.startsWith("m:") && same(key.slice(2))) ?? null);
  }

  // Keys, in the order of the graph, that a text is found in. "layers.17" finds layers.0-31.
  search(text) {
    const wanted = text.toLowerCase();
    const number = Number(/(?:^|\.)(\d+)/.exec(wanted)?.[1] ?? NaN);
    const one = (hay, low, high) => (number >= low && number <= high ? number : hay);
    const holds = (hay) =>
      hay.includes(wanted) ||
      (!Number.isNaN(number) &&
        hay.replace(/(\d+)-(\d+)/g, (run, low, high) => one(run, +low, +high)).includes(wanted));
    const keys = [];
    for (const [key, found] of this.byKey) {
      if (
        found instanceof Module
          ? found.path && !found.label && holds(found.path.toLowerCase())
          : this.shownAs(found) &&
            holds(`${found.label}\n${found.name}\n${found.module}.${opName(found.label)}`.toLowerCase())
      ) {
        keys.push(key);
      }
    }
    return keys;
  }
}

// Seconds and bytes of collectives by kind and axes, those that take longest first.
function totals(edges) {
  const found = new Map();
  for (const edge of edges) {
    for (const one of edge.moved) {
      const repeat = edge.reader.kind === "output" ? (edge.source.repeat ?? 1) : (edge.reader.repeat ?? 1);
      const key = `${one.kind}[${one.axes}]`;
      const sum = found.get(key) ?? { key, kind: one.kind, count: 0, seconds: 0, nbytes: 0 };
      sum.count += repeat;
      sum.seconds += repeat * one.seconds;
      sum.nbytes += repeat * one.nbytes;
      found.set(key, sum);
    }
  }
  return [...found.values()].sort((a, b) => b.seconds - a.seconds);
}

// The transfers that belong to a node: in front of it, and of its results on their way out of the graph.
const transfersOf = (node) => [
  ...node.reads,
  ...node.readers.filter((edge) => edge.reader.kind === "output"),
];
