"use strict";
// The page: the bar, panes of one plan or two, and one selection for all views.

const page = JSON.parse(document.getElementById("data").textContent);
const colourOf = (kind) => page.colours[kind] ?? page.colours.other;
const get = (id) => document.getElementById(id);

function showTip(text, x = 0, y = 0) {
  const tip = get("tip");
  tip.hidden = !text;
  if (!text) {
    return;
  }
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, y + 16 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 16)}px`;
}

// The views of one plan.
class Pane {
  constructor(plan, app) {
    Object.assign(this, { plan, app });
    plan.models = plan.stages.map((stage, number, all) => new Stage(stage, number, all.length > 1));
    const graph = make("section", { class: "view graph" }),
      charts = make("section", { class: "charts" });
    this.element = make("div", { class: "pane" }, graph, charts);
    this.graph = new GraphView(graph, (key) => app.select(key, { from: this }));
    this.charts = new Charts(charts, page, {
      chart: (number) => this.showChart(number),
      span: (span) => this._span(span),
      moment: (at) => app.moment(at),
    });
  }

  start() {
    this.showStage(0);
    this.charts.show(this.plan, 0);
  }

  showStage(number) {
    if (this.stage?.number === number) {
      return;
    }
    this.stage = this.plan.models[number];
    const several = this.plan.models.length > 1 || page.plans.length > 1;
    this.graph.show(
      this.stage,
      !several
        ? ""
        : page.plans.length > 1
          ? this.plan.name + (this.plan.models.length > 1 ? `, stage ${number}` : "")
          : `Stage ${number}`,
    );
  }

  showChart(number) {
    if (this.plan.charts[0].kind === "pipeline" && number) {
      this.showStage(number - 1);
    }
    this.charts.show(this.plan, number);
    this.app.select(null);
  }

  _span(span) {
    if (span.piece === undefined) {
      if (span.place >= 0) {
        this.app.select(this.stage.nodes[span.place].key, { from: this, reveal: true });
      }
      return;
    }
    if (span.stage != null) {
      this.showStage(span.stage);
    }
    this.app.select(null);
    this.charts.select(new Set(), span.piece == null ? null : span);
    this.app.panel.action(
      span,
      `The graph shows stage ${span.stage ?? 0}; the list above the timeline has a piece of each stage in detail.`,
    );
  }

  select(key) {
    this.graph.select(key);
    this.charts.select(key ? this.stage.places(key) : new Set());
  }
}

class App {
  constructor() {
    this.page = page;
    this.selected = null;
    this.hits = [];
    this.panel = new Panel(get("panel"), this);
    this.panes = page.plans.map((plan) => new Pane(plan, this));
    get("panes").append(...this.panes.map((pane) => pane.element));
    this._bar();
    this._tabs();
    this._theme();
    this._search();
    addEventListener("keydown", (event) => this._key(event));
    for (const pane of this.panes) {
      pane.start();
    }
    this.select(null);
  }

  // from: the pane that was clicked, which shows it already. reveal: wherever it is.
  select(key, { from = null, reveal = false } = {}) {
    this.selected = key;
    for (const pane of this.panes) {
      if (key && (reveal || pane !== from || !pane.graph.boxes.has(key))) {
        pane.graph.reveal(key);
      }
      pane.select(key);
      pane.charts.setMoment(null);
    }
    const models = this.panes.map((pane) => pane.stage),
      plans = page.plans;
    if (key) {
      this.panel.show(models, plans, key);
    } else {
      this.panel.overview(models, plans);
    }
  }

  moment(at) {
    const moments = this.panes
      .filter((pane) => pane.charts.chart.memory)
      .map((pane) => {
        pane.charts.setMoment(at);
        return { chart: pane.charts.chart, alive: pane.charts.alive(at) };
      });
    this.panel.moment(moments, page.plans);
    this._show("panel", true);
  }

  keyNamed(name) {
    for (const pane of this.panes) {
      const key = name && pane.stage.named(name);
      if (key) {
        return key;
      }
    }
    return null;
  }

  _bar() {
    const { plans } = page;
    get("summary").append(plans.length === 1 ? this._facts(plans[0]) : this._compared(plans));
    get("more").addEventListener("click", () => {
      const open = get("bar").classList.toggle("open");
      get("more").setAttribute("aria-expanded", String(open));
    });
    get("help").addEventListener("click", () => {
      this.select(null);
      this._show("panel", true);
    });
  }

  _facts(plan) {
    const main = new Set(["step", "memory", "proof", ...Object.keys(plan.stages[0].mesh)]);
    return make(
      "dl",
      { class: "facts" },
      ...plan.summary.map(([subject, words]) =>
        make(
          "div",
          { class: main.has(subject) ? "" : "aside" },
          make("dt", {}, subject),
          make("dd", {}, words, this._gauge(subject, plan)),
        ),
      ),
    );
  }

  _compared(plans) {
    const subjects = [...new Set(plans.flatMap((plan) => plan.summary.map(([subject]) => subject)))].filter(
      (subject) => subject !== "more",
    );
    const words = (plan, subject) => plan.summary.find(([name]) => name === subject)?.[1] ?? "–";
    return make(
      "table",
      {},
      make("tr", {}, make("th"), ...plans.map((plan) => make("th", {}, plan.name))),
      ...subjects.map((subject) => {
        const said = plans.map((plan) => words(plan, subject)),
          differs = said[0] !== said[1];
        return make(
          "tr",
          { class: differs ? "" : "aside" },
          make("td", {}, subject),
          ...said.map((text, i) =>
            make("td", { class: differs && i ? "other" : "" }, text, this._gauge(subject, plans[i])),
          ),
        );
      }),
    );
  }

  // The step by what it is spent on; memory of its limit.
  _gauge(subject, plan) {
    const bar = (parts, title) =>
      make(
        "span",
        { class: "gauge", title },
        ...parts.map(([share, colour]) =>
          make("i", { style: `width:${100 * Math.min(1, share)}%;background:${colour}` }),
        ),
      );
    if (subject === "step" && plan.parts && plan.step) {
      const [computed, , exposed] = plan.parts.map((part) => part / plan.step);
      return bar(
        [
          [computed, "var(--forward)"],
          [exposed, "var(--exposed)"],
        ],
        `${percent(exposed)} exposed`,
      );
    }
    if (subject === "memory" && plan.limit) {
      return bar(
        [[plan.peak / plan.limit, "var(--accent)"]],
        `${percent(plan.peak / plan.limit)} of the limit`,
      );
    }
    return null;
  }

  _tabs() {
    for (const tab of get("tabs").children) {
      tab.addEventListener("click", () => this._show(tab.dataset.tab));
    }
    this._show("graph");
  }

  // narrow: only where one is seen at a time.
  _show(name, narrow = false) {
    if (narrow && !matchMedia("(max-width: 860px)").matches) {
      return;
    }
    document.querySelector("main").dataset.tab = name;
    for (const tab of get("tabs").children) {
      tab.setAttribute("aria-selected", String(tab.dataset.tab === name));
    }
  }

  _theme() {
    const dark = matchMedia("(prefers-color-scheme: dark)"),
      root = document.documentElement;
    const set = (name) => {
      root.dataset.theme = name;
      for (const pane of this.panes) {
        pane.charts.paint();
      }
    };
    set(dark.matches ? "dark" : "light");
    dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
    get("theme").addEventListener("click", () => set(root.dataset.theme === "dark" ? "light" : "dark"));
  }

  _search() {
    const find = get("find");
    find.addEventListener("input", () => {
      const text = find.value.trim();
      this.hits = text ? [...new Set(this.panes.flatMap((pane) => pane.stage.search(text)))] : [];
      this.hit = -1;
      if (this.hits.length) {
        this._go(1);
      } else {
        this._count();
      }
    });
    get("next").addEventListener("click", () => this._go(1));
    get("previous").addEventListener("click", () => this._go(-1));
    this._count();
  }

  _go(by) {
    if (!this.hits.length) {
      return;
    }
    this.hit = (this.hit + by + this.hits.length) % this.hits.length;
    this.select(this.hits[this.hit], { reveal: true });
    this._count();
  }

  _count() {
    const asked = get("find").value.trim();
    get("count").textContent = !asked
      ? ""
      : this.hits.length
        ? `${this.hit + 1} of ${this.hits.length}`
        : "none";
    for (const id of ["previous", "next"]) {
      get(id).disabled = !this.hits.length;
    }
  }

  _key(event) {
    const find = get("find"),
      typing = event.target === find;
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") {
      return;
    }
    if (event.key === "Escape") {
      find.value = "";
      find.dispatchEvent(new Event("input"));
      find.blur();
      this.select(null);
    } else if (typing) {
      if (event.key === "Enter") {
        this._go(event.shiftKey ? -1 : 1);
      }
    } else if (event.key === "/") {
      event.preventDefault();
      find.focus();
      find.select();
    } else if (event.key === "f") {
      for (const pane of this.panes) {
        pane.graph.fit();
        pane.charts.fit();
      }
    } else if (event.key.startsWith("Arrow")) {
      event.preventDefault();
      const next = this.panes[0].graph.neighbour(event.key);
      if (next) {
        this.select(next, { reveal: true });
      }
    } else if (event.key === "Enter" && this.selected && event.target.tagName !== "BUTTON") {
      for (const pane of this.panes) {
        pane.graph.toggle(this.selected);
      }
    }
  }
}

window.report = new App();
