"use strict";
// Time: kernels and collectives on their streams, or the ranks of a pipeline. Below it memory, over the same seconds.

const ROW = 22,
  LABEL = 118,
  AXIS = 20,
  MEMORY = 132,
  RIGHT = 14;
const PHASES = { f: "forward", b: "backward", o: "optimizer" };
const ACTIONS = {
  forward: "forward",
  backward: "backward",
  input: "backward",
  weight: "optimizer",
  once: "once",
  sent: "sent",
  returned: "sent",
};
const WORDS = {
  input: "backward of inputs",
  weight: "backward of weights",
  once: "once a step",
  sent: "values sent on",
  returned: "gradients sent back",
};
const MEMORY_COLOURS = {
  parameters: "#4b6fd6",
  gradients: "#d9903d",
  optimizer: "#7b61c9",
  inputs: "#9aa3b2",
  kept: "#3c9a86",
  again: "#8ac5b9",
  moved: "#c4598a",
  working: "#c9b458",
};

// A row's spans: place of the node or -1, start and end in seconds, colour, label, and in words where it is.
class Charts {
  // told: { span(span), moment(seconds) } hear what is clicked.
  constructor(root, page, told) {
    Object.assign(this, { page, told, places: new Set(), stageSelected: null });
    this.pick = make("select", {
      "aria-label": "What is drawn over time",
      onchange: () => told.chart(Number(this.pick.value)),
    });
    this.keys = make("div", { class: "keys" });
    this.time = make("canvas", { "aria-label": "Timeline", role: "img" });
    this.memory = make("canvas", { "aria-label": "Memory over time", role: "img" });
    root.append(
      make(
        "div",
        { class: "strip" },
        this.pick,
        this.keys,
        make("span", { class: "grow" }),
        make("button", { type: "button", onclick: () => this.fit() }, "Fit"),
      ),
      this.time,
      this.memory,
    );
    for (const canvas of [this.time, this.memory]) {
      this._listen(canvas);
    }
    new ResizeObserver(() => this.paint()).observe(root);
  }

  show(plan, number) {
    this.plan = plan;
    this.chart = plan.charts[number];
    // Steps of two plans are drawn to one scale.
    const steps = number ? [] : this.page.plans.map((one) => one.charts[0].seconds);
    this.whole = Math.max(this.chart.seconds, ...steps, 1e-12);
    this.pick.replaceChildren(
      ...plan.charts.map((chart, i) =>
        make("option", { value: i, selected: i === number }, this._nameOf(chart, i)),
      ),
    );
    this.pick.hidden = plan.charts.length < 2;
    this.stage = plan.models[this.chart.kind === "pipeline" ? 0 : plan.charts.length > 1 ? number - 1 : 0];
    this.rows = this.chart.kind === "pipeline" ? this._ranks() : this._streams();
    this.curve = this.chart.memory ? this._curve(this.chart.memory) : [];
    this._legend();
    this.fit();
  }

  _nameOf(chart, i) {
    return chart.kind === "pipeline"
      ? "All stages"
      : this.plan.charts.length > 1
        ? `Stage ${i - 1}, one piece`
        : "The step";
  }

  // Rows of a step: which phase it is, kernels, collectives, and what of these is exposed.
  _streams() {
    const rows = { phase: [], compute: [], communication: [], "beside it": [], exposed: [] };
    let begin = 0;
    for (const part of this.chart.parts) {
      for (let i = 0; i < part.times; i += 1, begin += part.seconds) {
        this._addPart(rows, part, begin, part.times > 1 ? ` · piece ${i}` : "");
      }
    }
    return Object.entries(rows)
      .filter(([name, spans]) => spans.length || !["phase", "beside it"].includes(name))
      .map(([name, spans]) => ({ name, spans }));
  }

  _addPart(rows, part, begin, piece) {
    const { modules, nodes } = this.stage;
    for (const [place, module, phase, start, end] of part.kernels) {
      const span = {
        place,
        start: begin + 1e-6 * start,
        end: begin + 1e-6 * end,
        colour: `var(--${PHASES[phase]})`,
        phase,
        label: place < 0 ? (phase === "o" ? "update" : modules[module]) : opName(nodes[place].label),
        where: modules[module] + piece,
      };
      rows.compute.push(span);
      const band = rows.phase.at(-1);
      if (band?.phase === phase) {
        band.end = span.end;
      } else {
        rows.phase.push({
          ...span,
          place: -1,
          label: PHASES[phase] === "optimizer" ? "update" : PHASES[phase],
          where: piece,
          band: true,
        });
      }
    }
    for (const [place, serves, phase, start, end, kind, axes, nbytes, exposed] of part.moved) {
      const span = {
        place,
        start: begin + 1e-6 * start,
        end: begin + 1e-6 * end,
        colour: colourOf(kind),
        phase,
        nbytes,
        exposed: 1e-6 * exposed,
        label: `${kind}[${axes}]`,
        where: modules[serves] + piece,
      };
      // Over another link it may run beside the one before; a microsecond is rounding.
      const beside = rows.communication.at(-1)?.end > span.start + 1e-6;
      rows[beside ? "beside it" : "communication"].push(span);
      if (exposed > 0) {
        rows.exposed.push({
          ...span,
          start: span.end - Math.min(1e-6 * exposed, span.end - span.start),
          colour: "var(--exposed)",
        });
      }
    }
  }

  // The part that runs several times, and when it begins.
  get _repeated() {
    let begin = 0;
    for (const part of this.chart.parts ?? []) {
      if (part.times > 1) {
        return { ...part, begin };
      }
      begin += part.seconds;
    }
    return null;
  }

  // Points of the curve of memory: when, and which of its steps. Every piece has that of the first.
  _curve(memory) {
    const points = memory.seconds.map((at, step) => [at, step]),
      part = this._repeated;
    if (!part) {
      return points;
    }
    const end = part.begin + part.seconds,
      inside = points.filter(([at]) => at >= part.begin && at < end);
    const times = inside.length * part.times > 20000 ? 1 : part.times;
    const every = [...Array(times).keys()].flatMap((piece) =>
      inside.map(([at, step]) => [at + piece * part.seconds, step]),
    );
    return [...points.filter(([at]) => at < part.begin), ...every, ...points.filter(([at]) => at >= end)];
  }

  _ranks() {
    return this.chart.rows.map(({ name, spans }) => ({
      name,
      spans: spans
        .filter(([kind]) => kind !== "bubble")
        .map(([kind, stage, piece, start, end]) => ({
          place: -1,
          stage,
          piece,
          kind,
          start,
          end,
          colour:
            ACTIONS[kind] === "once"
              ? "var(--optimizer)"
              : ACTIONS[kind] === "sent"
                ? colourOf("all_to_all")
                : `var(--${ACTIONS[kind]})`,
          label: piece == null ? "" : String(piece),
          where: `${WORDS[kind] ?? kind}${piece == null ? "" : ` of piece ${piece}, stage ${stage}`}`,
        })),
    }));
  }

  _legend() {
    const key = (colour, text) =>
      make("span", { class: "key" }, make("i", { style: `background:${colour}` }), text);
    const kinds = new Set(
      this.chart.kind === "step" ? this.chart.parts.flatMap((part) => part.moved.map((one) => one[5])) : [],
    );
    const gaps =
      this.chart.kind === "pipeline"
        ? [
            key("var(--optimizer)", "update, gradients of weights"),
            key(colourOf("all_to_all"), "between stages"),
            key("var(--line)", "bubble"),
          ]
        : [...[...kinds].map((kind) => key(colourOf(kind), kind)), key("var(--exposed)", "exposed")];
    this.keys.replaceChildren(key("var(--forward)", "forward"), key("var(--backward)", "backward"), ...gaps);
  }

  fit() {
    this.range = [0, this.whole];
    this.paint();
  }

  // places: of selected nodes; stage, piece: of a selected action.
  select(places, action = null) {
    this.places = places;
    this.action = action;
    this.paint();
  }

  _isSelected(span) {
    if (this.chart.kind !== "pipeline") {
      return this.places.has(span.place) && !span.band;
    }
    return this.action ? span.piece === this.action.piece : false;
  }

  get _selecting() {
    return this.chart.kind === "pipeline" ? this.action != null : this.places.size > 0;
  }

  paint() {
    if (!this.chart || !this.time.clientWidth) {
      return;
    }
    this._paintTime();
    this._paintMemory();
  }

  _surface(canvas, height) {
    const ratio = devicePixelRatio || 1,
      width = canvas.parentElement.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const surface = canvas.getContext("2d");
    surface.scale(ratio, ratio);
    surface.font = "11px system-ui, sans-serif";
    surface.textBaseline = "middle";
    const style = getComputedStyle(document.documentElement);
    this.colour = (name) => (name.startsWith("var(") ? style.getPropertyValue(name.slice(4, -1)) : name);
    this.width = width;
    return surface;
  }

  _x(seconds) {
    return (
      LABEL + ((seconds - this.range[0]) / (this.range[1] - this.range[0])) * (this.width - LABEL - RIGHT)
    );
  }
  _seconds(x) {
    return this.range[0] + ((x - LABEL) / (this.width - LABEL - RIGHT)) * (this.range[1] - this.range[0]);
  }

  _rowHeight() {
    return this.rows.length > 12 ? 13 : ROW;
  }

  _paintTime() {
    const row = this._rowHeight(),
      surface = this._surface(this.time, this.chart.seconds ? AXIS + this.rows.length * row + 4 : 26);
    if (!this.chart.seconds) {
      surface.fillStyle = this.colour("var(--quiet)");
      surface.textAlign = "left";
      surface.fillText("time: the plan does not know what runs when", 12, 12);
      return;
    }
    this._axis(surface);
    this.rows.forEach(({ name, spans }, number) => {
      const top = AXIS + number * row;
      surface.fillStyle = this.colour("var(--quiet)");
      surface.textAlign = "left";
      surface.fillText(shortened(name, "quiet", LABEL - 20), 12, top + row / 2);
      surface.fillStyle = this.colour("var(--line)");
      if (this.chart.kind === "pipeline" && name !== "sends") {
        const left = Math.max(LABEL, this._x(0));
        surface.fillRect(
          left,
          top + 2,
          Math.min(this.width - RIGHT, this._x(this.chart.seconds)) - left,
          row - 4,
        );
      }
      this._paintRow(surface, spans, top + 2, row - 4);
    });
  }

  _paintRow(surface, spans, top, height) {
    surface.save();
    surface.beginPath();
    surface.rect(LABEL, top, this.width - LABEL - RIGHT, height);
    surface.clip();
    let drawn = -Infinity;
    for (const span of spans) {
      if (span.end < this.range[0] || span.start > this.range[1]) {
        continue;
      }
      const left = this._x(span.start),
        right = this._x(span.end),
        selected = this._isSelected(span);
      if (right - drawn < 0.1 && !selected) {
        continue;
      } // Nothing that cannot be seen is drawn.
      surface.globalAlpha = this._selecting && !selected && !span.band ? 0.28 : 1;
      surface.fillStyle = this.colour(span.colour);
      const gap = right - left > 3 ? 0.6 : 0;
      surface.fillRect(left, top, Math.max(selected ? 1.5 : 0.4, right - left - gap), height);
      this._label(surface, span, left, right, top + height / 2, height);
      drawn = right;
    }
    surface.restore();
  }

  _label(surface, span, left, right, y, height) {
    left = Math.max(left, LABEL);
    const room = Math.min(right, this.width - RIGHT) - left - 8;
    if (room < 8 || height < 8 || widthOf(span.label, "quiet") > room) {
      return;
    }
    surface.fillStyle =
      span.colour === "var(--exposed)"
        ? this.colour("var(--back)")
        : /^#/.test(span.colour)
          ? "#fff"
          : this.colour("var(--text)");
    surface.textAlign = "left";
    surface.fillText(span.label, left + 4, y + 0.5);
  }

  _axis(surface) {
    const span = this.range[1] - this.range[0],
      ticks = Math.max(2, Math.min(8, Math.floor((this.width - LABEL) / 110)));
    const raw = span / ticks,
      power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((one) => one >= raw);
    surface.textAlign = "center";
    for (let at = Math.ceil(this.range[0] / step) * step; at <= this.range[1] + 1e-15; at += step) {
      const x = this._x(at);
      if (x > this.width - 34) {
        break;
      }
      surface.fillStyle = this.colour("var(--line)");
      surface.fillRect(x, AXIS - 4, 1, 4000);
      surface.fillStyle = this.colour("var(--quiet)");
      surface.fillText(at < step / 2 ? "0" : seconds(at), x, 8);
    }
  }

  _paintMemory() {
    const { memory } = this.chart;
    const surface = this._surface(this.memory, memory && this.chart.seconds ? MEMORY : 26);
    surface.fillStyle = this.colour("var(--quiet)");
    surface.textAlign = "left";
    if (!memory || !this.chart.seconds) {
      surface.fillText(`memory: ${memory ? "not known over time" : "the plan does not know it"}`, 12, 12);
      return;
    }
    surface.fillText("memory", 12, 12);
    const peak = memory.bytes[memory.peak].reduce((a, b) => a + b, 0);
    surface.fillText(bytes(peak), 12, 28);
    if (memory.limit) {
      surface.fillText(`of ${bytes(memory.limit)}`, 12, 44);
    }
    this._stack(surface, memory, peak);
    this._marks(surface, memory, peak);
  }

  // The limit is drawn where the curve comes near to it: else the curve would be flat.
  _top(memory, peak) {
    return memory.limit && memory.limit < 1.6 * peak ? 1.04 * Math.max(memory.limit, peak) : 1.08 * peak;
  }

  _stack(surface, memory, peak) {
    const y = (value) => MEMORY - 6 - (value / this._top(memory, peak)) * (MEMORY - 16);
    const below = this.curve.map(() => 0);
    surface.save();
    surface.beginPath();
    surface.rect(LABEL, 0, this.width - LABEL - RIGHT, MEMORY);
    surface.clip();
    this.page.kinds.forEach((kind, column) => {
      if (!memory.bytes.some((row) => row[column])) {
        return;
      }
      const lower = [...below];
      surface.beginPath();
      this.curve.forEach(([at, step], i) => {
        below[i] += memory.bytes[step][column];
        surface.lineTo(this._x(at), y(below[i]));
      });
      surface.lineTo(this._x(this.chart.seconds), y(below.at(-1)));
      surface.lineTo(this._x(this.chart.seconds), y(lower.at(-1)));
      for (let i = lower.length - 1; i >= 0; i -= 1) {
        surface.lineTo(this._x(this.curve[i][0]), y(lower[i]));
      }
      surface.closePath();
      surface.fillStyle = MEMORY_COLOURS[kind];
      surface.globalAlpha = 0.85;
      surface.fill();
    });
    surface.restore();
    if (memory.limit && memory.limit <= this._top(memory, peak)) {
      surface.strokeStyle = this.colour("var(--limit)");
      surface.setLineDash([5, 3]);
      surface.strokeRect(LABEL, y(memory.limit), this.width - LABEL - RIGHT, 0);
      surface.setLineDash([]);
    }
  }

  _marks(surface, memory) {
    const inside = (x) => x >= LABEL && x <= this.width - RIGHT;
    const line = (at, colour, dash) => {
      const x = this._x(at);
      if (!inside(x)) {
        return;
      }
      surface.strokeStyle = this.colour(colour);
      surface.setLineDash(dash);
      surface.strokeRect(x, 4, 0, MEMORY - 10);
      surface.setLineDash([]);
    };
    line(memory.seconds[memory.peak], "var(--text)", [2, 2]);
    if (this.moment != null) {
      line(this.moment, "var(--accent)", []);
    }
  }

  setMoment(at) {
    this.moment = at;
    this.paint();
  }

  // What is alive at a moment: bytes by kind, and the values that are known, the largest first.
  alive(at) {
    const { memory } = this.chart,
      part = this._repeated,
      moment = at;
    if (part && at > part.begin && at < part.begin + part.times * part.seconds) {
      at = part.begin + ((at - part.begin) % part.seconds);
    }
    let place = 0;
    while (place + 1 < memory.seconds.length && memory.seconds[place + 1] <= at) {
      place += 1;
    }
    const values = memory.everywhere
      ? memory.values.filter((one) => one[6] <= at && at < one[7])
      : place === memory.peak
        ? memory.values
        : [];
    return {
      at: moment - at + memory.seconds[place],
      node: memory.nodes[place],
      bytes: memory.bytes[place],
      values,
      peak: place === memory.peak,
    };
  }

  _spanAt(x, y) {
    const row = this.rows[Math.floor((y - AXIS) / this._rowHeight())],
      at = this._seconds(x);
    const near = (2 * (this.range[1] - this.range[0])) / this.width;
    return row && x > LABEL
      ? row.spans.find(
          (span) =>
            span.start - near <= at &&
            at <= span.end + near &&
            (span.start <= at || span.end - span.start < near),
        )
      : null;
  }

  _words(span) {
    const lines = [
      `${span.label && span.piece == null ? `${span.label}  ` : ""}${seconds(span.end - span.start)}`,
      span.where,
    ];
    if (span.nbytes) {
      lines.push(bytes(span.nbytes));
    }
    if (span.exposed) {
      lines.push(`${seconds(span.exposed)} exposed`);
    }
    return lines.filter(Boolean).join("\n");
  }

  _listen(canvas) {
    let grip = null;
    const at = (event) => {
      const { left, top } = canvas.getBoundingClientRect();
      return [event.clientX - left, event.clientY - top];
    };
    const hovered = (x, y) => {
      if (canvas === this.time) {
        const span = this._spanAt(x, y);
        return span ? this._words(span) : null;
      }
      if (!this.chart.memory || !this.chart.seconds || x < LABEL) {
        return null;
      }
      const moment = this.alive(this._seconds(x));
      const kinds = this.page.kinds
        .map((kind, i) => [kind, moment.bytes[i]])
        .filter(([, n]) => n)
        .sort((a, b) => b[1] - a[1]);
      return [
        `${bytes(moment.bytes.reduce((a, b) => a + b, 0))}${moment.peak ? ", the peak" : ""} at ${seconds(moment.at)}`,
        ...kinds.map(([kind, n]) => `${kind} ${bytes(n)}`),
      ].join("\n");
    };
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        this._zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.005), this._seconds(at(event)[0]));
      },
      { passive: false },
    );
    canvas.addEventListener("pointerdown", (event) => {
      grip = { x: event.clientX, range: this.range, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (!grip) {
        showTip(hovered(x, y), event.clientX, event.clientY);
        return;
      }
      grip.moved ||= Math.abs(event.clientX - grip.x) > 4;
      if (grip.moved) {
        this._slide(grip.range, (grip.x - event.clientX) / (this.width - LABEL - RIGHT));
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      const click = grip && !grip.moved;
      grip = null;
      if (click) {
        this._clicked(canvas, ...at(event));
      }
    });
    canvas.addEventListener("pointerleave", () => showTip(null));
  }

  _clicked(canvas, x, y) {
    if (!this.chart.seconds) {
      return;
    }
    if (canvas === this.time) {
      const span = this._spanAt(x, y);
      if (span) {
        this.told.span(span);
      }
    } else if (this.chart.memory && x > LABEL) {
      this.told.moment(this._seconds(x));
    }
  }

  _slide([from, to], share) {
    const by = Math.max(-from, Math.min(this.whole - to, share * (to - from)));
    this.range = [from + by, to + by];
    this.paint();
  }

  _zoom(factor, about) {
    const whole = this.whole,
      [from, to] = this.range;
    const length = Math.max(whole * 1e-5, Math.min(whole, (to - from) * factor));
    const start = Math.max(0, Math.min(whole - length, about - ((about - from) * length) / (to - from)));
    this.range = [start, start + length];
    this.paint();
  }
}
