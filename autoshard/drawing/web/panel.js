"use strict";
// Details of what is selected: layouts on the mesh, transfers, alternatives; what is alive at a moment; the legend.

const heading = (text) => make("h3", {}, text);
const number = (text) => make("td", { class: "number" }, text);
const dot = (colour) => make("span", { class: "dot", style: `background:${colour}` });

function table(heads, rows) {
  const head = heads.length
    ? make("tr", {}, ...heads.map((text, i) => make("th", { class: i ? "number" : "" }, text)))
    : null;
  return make("table", {}, head, ...rows);
}

class Panel {
  // app: { select(key), page }.
  constructor(root, app) {
    this.root = root;
    this.app = app;
  }

  _fill(...children) {
    this.root.replaceChildren(...children.flat().filter(Boolean));
    this.root.scrollTop = 0;
  }

  _link(key, text) {
    return make("a", { onclick: () => this.app.select(key), tabindex: 0, role: "link" }, dotted(text));
  }

  // What is selected, of one plan or of both. models: the stages that are shown.
  show(models, plans, key) {
    const found = models.map((stage) => stage.byKey.get(key));
    if (!found.some(Boolean)) {
      this.overview(models, plans);
      return;
    }
    this._fill(
      ...found.flatMap((one, i) => [
        models.length > 1 ? make("h2", { class: "quiet" }, plans[i].name) : null,
        ...(!one
          ? [make("p", { class: "quiet" }, "not in this plan")]
          : one instanceof Module
            ? this._module(one, models[i])
            : this._node(one, models[i])),
      ]),
    );
  }

  overview(models, plans) {
    const { differences, colours } = this.app.page;
    const rows = (differences ?? []).map(([name, mine, other]) =>
      make(
        "tr",
        {},
        make("td", {}, this._linkNamed(models, name)),
        make("td", { class: "code" }, mine),
        make("td", { class: "code" }, other),
      ),
    );
    this._fill(
      differences
        ? [
            make("h2", {}, "What differs"),
            rows.length
              ? table(["parameter", ...plans.map((plan) => plan.name)], rows)
              : make("p", {}, "No parameter is laid out otherwise."),
          ]
        : null,
      ...models.flatMap((stage, i) => {
        const sums = totals(
          stage.edges.map(([s, r, , moved]) => ({ source: stage.nodes[s], reader: stage.nodes[r], moved })),
        );
        return [
          heading(
            [models.length > 1 ? `${plans[i].name}: ` : "", "collectives of a step", stage.suffix].join(""),
          ),
          this._sums(sums),
        ];
      }),
      heading("Colours"),
      make(
        "div",
        { class: "keys" },
        ...[
          ...Object.entries({
            forward: "var(--forward)",
            backward: "var(--backward)",
            exposed: "var(--exposed)",
          }),
          ...Object.entries(colours),
        ]
          .filter(([name]) => name !== "other")
          .map(([name, colour]) =>
            make("span", { class: "key" }, make("i", { style: `background:${colour}` }), name),
          ),
      ),
      make(
        "div",
        { class: "keys", style: "margin-top:6px" },
        ...this.app.page.kinds.map((kind) =>
          make("span", { class: "key" }, make("i", { style: `background:${MEMORY_COLOURS[kind]}` }), kind),
        ),
      ),
      heading("How to read it"),
      make(
        "p",
        {},
        "Click a module to unfold it. Equal layers are drawn once. A box has the transfers in front of it, an edge the colour of what moves along it.",
      ),
      make(
        "p",
        {},
        make("code", {}, "f32[4096@tp@dp, 512]"),
        " is split over tp, and each part over dp; ",
        make("code", {}, "+tp:sum"),
        " is still to be summed over tp.",
      ),
      make("p", {}, "Exposed is what a collective makes the step longer: nothing hides it."),
      heading("Keys"),
      table(
        [],
        [
          ["/", "search"],
          ["Enter", "next hit; unfold or fold"],
          ["← ↑ ↓ →", "go to the next box"],
          ["f", "fit all"],
          ["Esc", "clear"],
        ].map(([key, text]) => make("tr", {}, make("td", {}, make("kbd", {}, key)), make("td", {}, text))),
      ),
    );
  }

  _linkNamed(models, name) {
    const key = models.map((stage) => stage.named(name)).find(Boolean);
    return key ? this._link(key, name) : dotted(name);
  }

  _sums(sums) {
    if (!sums.length) {
      return make("p", {}, "none: nothing moves between ranks");
    }
    return table(
      ["", "count", "bytes", "time"],
      sums.map((one) =>
        make(
          "tr",
          {},
          make("td", {}, dot(colourOf(one.kind)), one.key),
          number(String(one.count)),
          number(bytes(one.nbytes)),
          number(seconds(one.seconds)),
        ),
      ),
    );
  }

  _module(module, stage) {
    const nodes = [...module.all()],
      ops = nodes.filter((node) => node.kind === "op"),
      params = nodes.filter((node) => node.kind === "param");
    const time = (phase) =>
      ops
        .filter((node) => node.phase === phase)
        .reduce((sum, node) => sum + (node.repeat ?? 1) * node.seconds, 0);
    return [
      make("h2", {}, module.name),
      make(
        "p",
        { class: "quiet" },
        (module.repeat > 1 ? `${module.repeat} equal layers; ` : "") +
          `${seconds(time("forward"))} forward, ${seconds(time("backward"))} backward`,
      ),
      heading("Transfers"),
      this._sums(totals(nodes.flatMap(transfersOf))),
      params.length ? heading("Parameters") : null,
      params.length
        ? table(
            [],
            params.map((node) =>
              make(
                "tr",
                {},
                make("td", {}, this._link(node.key, node.label)),
                make("td", { class: "code" }, node.results[0]),
              ),
            ),
          )
        : null,
    ];
  }

  _words(node) {
    const time = node.seconds
      ? `${seconds(node.seconds)} ${node.kind === "param" ? "of the update" : "a step"}`
      : null;
    const repeat = node.repeat > 1 ? `in each of ${node.repeat} equal layers` : null;
    return [node.kind === "op" ? node.label : node.kind, node.phase, time, repeat]
      .filter(Boolean)
      .join(" · ");
  }

  _node(node, stage) {
    return [
      make("h2", {}, dotted(titleOf(node))),
      make("p", { class: "quiet" }, this._words(node)),
      node.home.path
        ? make(
            "p",
            {},
            this._link(node.home.key, node.home.label ? `${node.module || "model"}` : node.module),
          )
        : null,
      node.source ? make("p", { class: "code quiet" }, node.source) : null,
      ...node.results.flatMap((text, i) => [
        heading(node.results.length > 1 ? `Layout of result ${i}` : "Layout"),
        make("p", { class: "code" }, text),
        onMesh(stage.layouts[text], stage),
      ]),
      ...this._transfers(node),
      ...this._readers(node),
      ...this._alternatives(node, stage),
    ];
  }

  _transfers(node) {
    const rows = node.reads.flatMap((edge) => [
      make(
        "tr",
        {},
        make(
          "td",
          {},
          this._link(edge.source.key, titleOf(edge.source)),
          make("div", { class: "code quiet" }, `as ${edge.layout}`),
        ),
        make("td"),
      ),
      ...edge.moved.map((one) => this._transfer(one)),
    ]);
    const ends = node.readers
      .filter((edge) => edge.reader.kind === "output" && edge.moved.length)
      .flatMap((edge) => edge.moved.map((one) => this._transfer(one)));
    return [
      rows.length ? heading("Reads") : null,
      rows.length ? table([], rows) : null,
      ends.length ? heading("Its result is brought to the end of the step by") : null,
      ends.length ? table([], ends) : null,
    ];
  }

  _transfer(one) {
    const shared = one.bucket !== "-" ? " more, in a bucket with others" : "";
    return make(
      "tr",
      {},
      make("td", {}, dot(colourOf(one.kind)), one.text),
      number(`${bytes(one.nbytes)}, ${seconds(one.seconds)}${shared}`),
    );
  }

  _readers(node) {
    const readers = node.readers.filter((edge) => edge.reader.kind !== "output");
    if (!readers.length) {
      return [];
    }
    const most = 12,
      more = readers.length - most;
    const moved = readers.flatMap((edge) => edge.moved.map((one) => this._transfer(one)));
    return [
      heading("Read by"),
      node.kind !== "op" && moved.length ? table([], moved) : null,
      make(
        "p",
        {},
        ...readers
          .slice(0, most)
          .flatMap((edge, i) => [
            i ? ", " : "",
            this._link(
              edge.reader.key,
              `${titleOf(edge.reader)}${edge.reader.module ? ` in ${edge.reader.module}` : ""}`,
            ),
          ]),
        more > 0 ? ` and ${more} more` : "",
      ),
    ];
  }

  _alternatives(node, stage) {
    if (node.kind !== "op") {
      return [];
    }
    if (!stage.alternatives) {
      return [heading("Alternatives"), make("p", { class: "quiet" }, stage.why)];
    }
    const ways = stage.alternatives[node.name] ?? [];
    const rows = ways.map(([results, operands, own, moved, more], i) =>
      make(
        "tr",
        { class: i ? "" : "chosen" },
        make(
          "td",
          {},
          make("div", { class: "code" }, results.join(", ")),
          make("div", { class: "code quiet" }, operands.length ? `from ${operands.join(", ")}` : ""),
        ),
        number(seconds(own)),
        number(seconds(moved)),
        number(i ? `${more < 0 ? "−" : "+"}${seconds(Math.abs(more))}` : "chosen"),
      ),
    );
    return [
      heading("Alternatives, all else as it is"),
      rows.length > 1
        ? table(["result, operands", "op", "moves", ""], rows)
        : make("p", { class: "quiet" }, "The search had no other for this op."),
      rows.length > 1
        ? make(
            "p",
            { class: "quiet" },
            "Seconds as the search counts them, nothing hidden. One that is less here costs more elsewhere, or hides less.",
          )
        : null,
    ];
  }

  // What is alive at a moment.
  moment(moments, plans) {
    this._fill(
      ...moments.flatMap(({ chart, alive }, i) => {
        const total = alive.bytes.reduce((a, b) => a + b, 0);
        const kinds = this.app.page.kinds
          .map((kind, k) => [kind, alive.bytes[k]])
          .filter(([, n]) => n)
          .sort((a, b) => b[1] - a[1]);
        return [
          make(
            "h2",
            {},
            (moments.length > 1 ? `${plans[i].name}: ` : "") +
              `${bytes(total)} at ${seconds(alive.at)}${alive.peak ? ", the peak" : ""}`,
          ),
          make("p", { class: "code quiet" }, alive.node),
          table(
            [],
            kinds.map(([kind, n]) =>
              make(
                "tr",
                {},
                make("td", {}, dot(MEMORY_COLOURS[kind]), kind),
                number(bytes(n)),
                number(percent(n / total)),
              ),
            ),
          ),
          heading(chart.memory.everywhere || alive.peak ? "The largest that live then" : "What lives"),
          alive.values.length
            ? table(
                [],
                alive.values.slice(0, 60).map((one) => this._value(one)),
              )
            : make("p", { class: "quiet" }, "The plan knows the values at the peak alone: the dashed line."),
        ];
      }),
    );
  }

  _value([kind, name, op, value, count, nbytes]) {
    const key = this.app.keyNamed(name);
    return make(
      "tr",
      {},
      make(
        "td",
        {},
        dot(MEMORY_COLOURS[this.app.page.kinds[kind]]),
        key ? this._link(key, name) : dotted(name) || "model",
        " ",
        make("span", { class: "quiet" }, op, count > 1 ? ` ×${count}` : ""),
        make("div", { class: "code quiet" }, value),
      ),
      number(bytes(nbytes)),
    );
  }

  action(span, figures) {
    this._fill(
      make("h2", {}, `Stage ${span.stage ?? "–"}${span.piece == null ? "" : `, piece ${span.piece}`}`),
      make("p", {}, span.where),
      table(
        [],
        [
          ["begins", span.start],
          ["ends", span.end],
          ["takes", span.end - span.start],
        ].map(([name, value]) => make("tr", {}, make("td", {}, name), number(seconds(value)))),
      ),
      make("p", { class: "quiet" }, figures),
    );
  }
}
