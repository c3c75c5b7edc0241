// Drives pages in headless Chromium and prints what was seen, as JSON.
// node browse.js PLAYWRIGHT CHROMIUM FOLDER: plan.html, stages.html, old.html and diff.html are in FOLDER.
"use strict";

const [playwright, executablePath, folder] = process.argv.slice(2);
const { chromium } = require(playwright);

const WIDE = { width: 1440, height: 900 },
  NARROW = { width: 390, height: 844 };

async function main() {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  const told = { complaints: [], requests: [] };
  const open = async (name, viewport, colorScheme) => {
    const page = await (await browser.newContext({ viewport, colorScheme, offline: true })).newPage();
    page.on("console", (message) => {
      if (["error", "warning"].includes(message.type())) {
        told.complaints.push(message.text());
      }
    });
    page.on("pageerror", (error) => told.complaints.push(String(error)));
    page.on("request", (request) => {
      if (!/^(file|data):/.test(request.url())) {
        told.requests.push(request.url());
      }
    });
    await page.goto(`file://${folder}/${name}.html`);
    return page;
  };
  told.plan = await plan(await open("plan", WIDE, "light"));
  told.narrow = await narrow(await open("plan", NARROW, "dark"));
  told.stages = await stages(await open("stages", WIDE, "dark"));
  told.old = await (await open("old", WIDE, "light")).locator("#summary").textContent();
  told.diff = await diff(await open("diff", WIDE, "light"));
  await browser.close();
  process.stdout.write(JSON.stringify(told));
}

const texts = (page, selector) => page.locator(selector).allTextContents();
const keys = (page) => page.evaluate(() => [...report.panes[0].graph.boxes.keys()]);
const selected = (page) => page.evaluate(() => report.selected);
const background = (page) => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
// Whether texts of boxes stay inside of these, and boxes apart.
const overlaps = (page) =>
  page.evaluate(() => {
    const frames = [...document.querySelectorAll(".box")].map((box) =>
      [...box.children].map((child) => child.getBoundingClientRect()),
    );
    const outside = frames.filter(([frame, ...inner]) =>
      inner.some((one) => one.right > frame.right + 5 || one.bottom > frame.bottom + 5),
    ).length;
    const crossed = frames.some(([a], i) =>
      frames.some(
        ([b], j) => i < j && a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom,
      ),
    );
    return { outside, crossed };
  });

async function plan(page) {
  const seen = {
    bar: (await texts(page, "#summary dt, #summary dd")).join("\n"),
    first: await keys(page),
    background: await background(page),
  };
  seen.hacked = await page.evaluate(() => typeof hacked);
  // Unfold by a click, and fold by another.
  await page.locator('[data-key="m:blocks.1-3"]').click();
  seen.unfolded = await keys(page);
  seen.overlaps = await overlaps(page);
  seen.title = await page.locator("#panel h2").first().textContent();
  await page.locator('[data-key="m:blocks.1-3"] > .head').click();
  seen.folded = await keys(page);
  // Search: count, next, previous, and all views select.
  await page.keyboard.press("/");
  await page.keyboard.type("contract");
  seen.count = await page.locator("#count").textContent();
  seen.hit = await selected(page);
  seen.lit = await page.evaluate(() => [...report.panes[0].charts.places]);
  seen.place = await page.evaluate(() => report.panes[0].stage.byKey.get(report.selected).place);
  seen.marked = await page.locator(".box.selected").count();
  seen.details = await page.locator("#panel").textContent();
  await page.keyboard.press("Enter");
  seen.second = await page.locator("#count").textContent();
  await page.locator("#previous").click();
  seen.back = [await page.locator("#count").textContent(), await selected(page)];
  await page.locator("#find").fill("nothing of that name");
  seen.none = await page.locator("#count").textContent();
  await page.locator("#find").fill("blocks.2");
  seen.layer = await page.locator("#count").textContent();
  await page.keyboard.press("Escape");
  seen.cleared = await selected(page);
  // Arrows walk, Enter unfolds.
  await page.evaluate(() => report.panes[0].graph.foldAll());
  await page.keyboard.press("ArrowDown");
  const before = await selected(page);
  await page.keyboard.press("ArrowDown");
  seen.walked = [before, await selected(page)];
  await page.evaluate(() => report.select("m:blocks"));
  await page.keyboard.press("Enter");
  seen.entered = await keys(page);
  // A kernel of the timeline selects its op; a moment of memory tells what lives then.
  const at = await page.evaluate(() => {
    const { charts } = report.panes[0],
      row = charts.rows.findIndex((one) => one.name === "compute");
    const span = charts.rows[row].spans
      .filter((one) => one.place >= 0)
      .reduce((a, b) => (b.end - b.start > a.end - a.start ? b : a));
    const { left, top } = charts.time.getBoundingClientRect();
    return {
      x: left + charts._x((span.start + span.end) / 2),
      y: top + 20 + 22 * row + 11,
      key: charts.stage.nodes[span.place].key,
    };
  });
  await page.mouse.click(at.x, at.y);
  seen.clicked = [await selected(page), at.key];
  const memory = await page.locator('canvas[aria-label="Memory over time"]').boundingBox();
  await page.mouse.click(memory.x + 0.6 * memory.width, memory.y + 60);
  seen.moment = await page.locator("#panel").textContent();
  await page.locator("#theme").click();
  seen.dark = await background(page);
  return seen;
}

async function narrow(page) {
  const wide = () => page.evaluate(() => document.documentElement.scrollWidth);
  const seen = { background: await background(page), widths: [await wide()], visible: [] };
  for (const tab of ["graph", "charts", "panel"]) {
    await page.locator(`[data-tab="${tab}"][role="tab"]`).click();
    seen.widths.push(await wide());
    seen.visible.push(
      await page.evaluate(() =>
        [".graph", ".charts", "#panel"].filter((one) => document.querySelector(one).offsetParent),
      ),
    );
  }
  seen.bar = await page.locator("#bar").evaluate((bar) => bar.getBoundingClientRect().top);
  return seen;
}

async function stages(page) {
  const seen = { options: await texts(page, "select option"), name: await texts(page, ".graph .name") };
  await page.locator("select").selectOption("2");
  seen.then = await texts(page, ".graph .name");
  await page.locator("select").selectOption("0");
  const spot = await page.evaluate(() => {
    const { charts } = report.panes[0],
      span = charts.rows[0].spans.find((one) => one.piece === 2 && one.kind === "forward");
    const { left, top } = charts.time.getBoundingClientRect();
    return { x: left + charts._x((span.start + span.end) / 2), y: top + 20 + 11 };
  });
  await page.mouse.click(spot.x, spot.y);
  seen.details = await page.locator("#panel").textContent();
  seen.stage = await texts(page, ".graph .name");
  return seen;
}

async function diff(page) {
  const seen = {
    heads: await texts(page, "#summary th"),
    panes: await page.locator(".pane").count(),
    panel: await page.locator("#panel").textContent(),
  };
  await page.evaluate(() => report.select("m:head", { reveal: true }));
  seen.marked = await page.locator(".selected").count();
  seen.ranges = await page.evaluate(() => report.panes.map((pane) => pane.charts.range));
  return seen;
}

main().catch((error) => {
  process.stderr.write(`${error.stack}\n`);
  process.exit(1);
});
