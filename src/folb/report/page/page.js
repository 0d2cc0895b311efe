// The page: experiments from its own data or, on a live page, piece by piece from the server.

const POLL = 400; // milliseconds
const POLL_LIST = 2000;

class Experiment {
  devices = null;

  /**
   * `ask` fetches the records of a chosen run, if they are not all here already. `prefix` distinguishes its part of
   * the address from those of other experiments.
   */
  constructor(id, about, prefix = "", ask = null) {
    Object.assign(this, { id, about, prefix, ask });
    this.runs = about.runs.map((run) => new Run(run, about.name, about.measures));
    this.seeds = new Set(this.runs.map((run) => run.seed)).size;
    const arms = armsOf(this.runs, this.runs.map((run) => run.algorithm), this.runs.map((run) => run.style));
    const { name, measures, target } = about;
    this.curves = new Curves({ id, name, arms, measures, target, aim: () => this.tabulate() });
    address.add(prefix, this.curves);
    this.state = h("span", { class: "state" });
    this.progress = h("progress", { "aria-label": "Rounds done" });
    this.results = new Results("Results");
    this.place = h("div");
    this.trouble = h("div");
    this.again = h("div");
  }

  node(level) {
    const { about } = this;
    const section = (title, ...content) => h("section", {}, h(`h${level + 1}`, {}, title), ...content);
    const blocks = about.toml.split(/(?<=\n\n)/).map((block) => h("span", {}, block));
    return h("article", { id: `experiment-${this.id}` },
      h("header", {},
        h(`h${level}`, {}, about.title),
        h("p", { class: "name" }, h("code", {}, about.name), this.state, this.progress),
        about.note ? h("p", { class: "note" }, `The data: ${about.note}`) : "",
        pairs(about.facts)),
      section("Curves", this.curves.node),
      section("Results", this.results.node),
      section("Devices", this.place, this.trouble),
      section("Configuration", h("pre", { class: "toml", "aria-label": "experiment.toml" }, ...blocks),
        h("details", {}, h("summary", {}, "Environment"), pairs(about.environment))),
      section("Run it again", this.again));
  }

  append(columns) {
    columns.forEach((own, i) => this.runs[i].append(own));
  }

  /** The runs whose records can be shown. */
  recorded() {
    return [...this.runs.keys()].filter((i) => this.ask || this.runs[i].packed.length);
  }

  choose(i) {
    if (this.ask) this.ask(i);
    else this.devices.draw();
  }

  /** Show the data so far; on a live page, also the new state. */
  draw(about = this.about) {
    this.about = about;
    const done = this.runs.reduce((sum, run) => sum + run.rounds.length, 0);
    const all = about.rounds * this.runs.length;
    this.state.className = `state ${about.state}`;
    this.state.textContent = about.state + (done < all ? `, ${whole(done)} of ${whole(all)} rounds` : "");
    Object.assign(this.progress, { max: all, value: done, hidden: about.state !== "running" });
    this.curves.draw(true);
    this.again.replaceChildren(...about.again.flatMap(([text, command]) => [h("p", {}, text), h("pre", {}, command)]));
    this.trouble.replaceChildren(this.wentWrong());
    if (!this.devices) this.furnish();
    this.devices?.draw();
  }

  /** Rejected replies, lost devices and abandoned rounds, the newest first; nothing if there are none. */
  wentWrong() {
    const all = this.runs.flatMap((run) => run.trouble).reverse();
    if (!all.length) return "";
    const lines = all.map(([round, words]) => h("li", {}, `round ${round}: ${words}`));
    return h("details", {}, h("summary", {}, `Rejected, lost and abandoned: ${whole(all.length)}`), h("ul", {}, ...lines));
  }

  furnish() {
    const missing = (this.about.left_out ?? []).map((i) => this.runs[i].title).join("; ");
    const without = h("p", {}, "The run did not record its devices: use ", h("code", {}, "--records"), " for that.");
    if (this.about.records && this.recorded().length) address.add(this.prefix, (this.devices = new Devices(this)));
    this.place.replaceChildren(this.devices?.node ?? (this.about.records ? "" : without));
    if (missing) this.place.append(h("p", { class: "hint" }, `Not shown, to keep this page small: ${missing}.`));
  }

  tabulate() {
    const { about, curves } = this;
    const medians = `Values to the target, and held from, are medians over ${this.seeds} seeds; all others are means.`;
    const how = this.seeds > 1 ? medians : "One seed.";
    const soFar = about.state === "finished" ? "" : " The run is not finished.";
    this.results.show(about.table, curves, how + heldFrom(curves.by) + soFar);
  }
}

/** Curves and rows of several experiments in one place. */
class Together {
  constructor(experiments, { labels, styles, table, target, unequal }) {
    const runs = experiments.flatMap((experiment) => experiment.runs);
    this.results = new Results("Results of all runs");
    const measures = experiments.flatMap(({ about }) => about.measures);
    const known = measures.filter(({ name }, i) => measures.findIndex((other) => other.name === name) === i);
    const medians = "Values to the target, and held from, are medians over the seeds; all others are means.";
    const said = medians + heldFrom(known[0]);
    const aim = () => this.results.show(table, this.curves, said);
    const arms = armsOf(runs, labels.flat(), styles.flat());
    this.curves = new Curves({ id: "together", name: "runs", arms, measures: known, target, aim });
    address.add("", this.curves);
    this.node = h("article", { id: "together", class: "together" },
      h("h2", {}, "Together"),
      ...unequal.map((text) => h("p", { class: "note" }, text)),
      h("section", {}, h("h3", {}, "Curves"), this.curves.node),
      h("section", {}, h("h3", {}, "Results"), this.results.node));
  }
}

/** The button for light and dark. Charts follow the stylesheet; canvases must be drawn again. */
function theme(redraw) {
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const { dataset } = document.documentElement;
  const dark = () => (dataset.theme ? dataset.theme === "dark" : preferred.matches);
  const node = fill(button("", () => show((dataset.theme = dark() ? "light" : "dark"))), { class: "theme" }, []);
  const show = () => {
    node.textContent = dark() ? "Light colours" : "Dark colours";
    redraw();
  };
  preferred.addEventListener("change", show);
  matchMedia("print").addEventListener("change", redraw);
  show();
  return node;
}

/** The runs, the newest first; on a narrow screen each is a block of lines. */
function list(runs) {
  if (!runs.length) return h("p", {}, "There are no runs here yet.");
  const headings = ["run", "experiment", "state", "differs in", "started"];
  const row = ({ name, href, title, state, progress, differs, started, called, tags }) => {
    const shown = h("span", { class: `state ${state}` }, state + (progress ? `, ${progress}` : ""));
    const cells = [h("td", {}, title), h("td", {}, shown), h("td", { class: "differs-in" }, differs), h("td", {}, started)];
    const words = [called && `“${called}”`, tags && `(${tags})`].filter((word) => word).join(" ");
    const own = words ? h("span", { class: "apart" }, words) : "";
    return h("tr", {}, h("th", { scope: "row" }, h("a", { href }, name), " ", own), ...cells);
  };
  const head = h("thead", {}, h("tr", {}, ...headings.map((text) => h("th", { scope: "col" }, text))));
  return scrolling("Runs", h("table", { class: "runs" }, head, h("tbody", {}, ...runs.map(row))));
}

/** Ask the server again and again for the list of runs; it is drawn again only if it has changed. */
async function followList(runs, show, status) {
  let seen = JSON.stringify(runs);
  for (;;) {
    await new Promise((done) => setTimeout(done, POLL_LIST));
    try {
      const response = await fetch("/list", { signal: AbortSignal.timeout(60000) });
      status.textContent = response.ok ? "" : "waiting for the runs";
      const now = response.ok ? await response.json() : null;
      if (now && JSON.stringify(now) !== seen) show(now);
      if (now) seen = JSON.stringify(now);
    } catch {
      status.textContent = "reconnecting";
    }
  }
}

/** Ask the server again and again for news; the server and the run may go away and come back. */
async function follow(source, show, status) {
  let experiment = null;
  let cursor = "";
  let chosen = 0;
  let unread = true; // the address
  const ask = (i) => {
    chosen = i;
    cursor = ""; // from the beginning, with the records of another run
  };
  for (;;) {
    const records = chosen;
    let news = null;
    let pause = POLL;
    try {
      const query = new URLSearchParams({ after: cursor, records });
      const response = await fetch(`${source}?${query}`, { signal: AbortSignal.timeout(60000) });
      if (response.ok) news = await response.json();
      status.textContent = response.ok ? "" : "waiting for the run";
    } catch {
      status.textContent = "reconnecting";
    }
    if (news && records === chosen) {
      const { about } = news;
      const changed = about.state !== experiment?.about.state || news.columns.some((own) => own.rounds.length);
      if (experiment && about.identity !== experiment.about.identity && !news.fresh) {
        cursor = ""; // it has a new metric: build the page again, from the beginning
        continue;
      }
      if (about.identity !== experiment?.about.identity) {
        address.parts = [];
        show((experiment = new Experiment(0, about, "", ask)));
        unread = true;
      } else if (news.fresh) for (const run of experiment.runs) run.clear();
      experiment.append(news.columns);
      if (changed || news.fresh) experiment.draw(about);
      cursor = news.cursor;
      if (unread && !news.more) address.read(); // once all data are here, so that all of the address fits
      unread &&= news.more;
      if (news.more) pause = 0; // a long run comes in pieces
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}

function begin(view) {
  const shown = [];
  const main = h("main");
  const status = h("span", { class: "status", role: "status" });
  const colours = theme(() => shown.forEach((experiment) => experiment.devices?.draw()));
  const home = view.home ? h("a", { href: view.home }, "All runs") : "";
  document.body.append(h("div", { class: "top" }, h("span", { class: "brand" }, "folb"), home, status, colours), main);
  main.before(address.notice);
  if (view.list) {
    const place = h("div", {}, list(view.list));
    main.append(h("h1", {}, view.title), place);
    const show = (runs) => {
      const at = document.activeElement?.getAttribute("href");
      place.replaceChildren(list(runs));
      if (at) [...place.querySelectorAll("a")].find((link) => link.getAttribute("href") === at)?.focus();
    };
    followList(view.list, show, status);
  } else if (view.live) {
    follow(view.live, (experiment) => {
      shown[0] = experiment;
      document.title = experiment.about.title;
      main.replaceChildren(experiment.node(1));
    }, status);
  } else {
    const several = view.experiments.length > 1;
    const entry = ({ title, name, state, differs }, i) => {
      const apart = differs ? h("span", { class: "apart" }, differs) : "";
      return h("li", {}, h("a", { href: `#experiment-${i}` }, title), ` ${name}, ${state} `, apart);
    };
    if (several) main.append(h("h1", {}, view.title), h("nav", {}, h("ul", {}, ...view.experiments.map(entry))));
    view.experiments.forEach((about, i) => {
      const experiment = new Experiment(i, about, several ? `${i + 1}.` : "");
      shown.push(experiment);
      experiment.append(about.columns);
    });
    const together = several ? new Together(shown, view.together) : null;
    if (together) main.append(together.node);
    main.append(...shown.map((experiment) => experiment.node(several ? 2 : 1)));
    together?.curves.draw();
    for (const experiment of shown) experiment.draw();
    address.read();
  }
}

begin(JSON.parse(document.getElementById("view").textContent));
