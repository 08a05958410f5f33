// The browser of a lab's recorded runs, and the figures of the page that lists them. book/_ext/run_browser.py writes what
// they show: runs/index.js and runs/ID.js. Text of a record becomes text nodes; HTML are the figures of memlab.plots alone.
(() => {
  const STATIC = new URL(".", document.currentScript.src);
  const ROOT = new URL("..", STATIC);
  const LABELS = { card: "played card" };
  const loading = new Map();
  let serial = 0;

  // A script, since a page that was opened from disk may not fetch.
  function load(id) {
    if (!loading.has(id)) {
      const loaded = new Promise((done, failed) => {
        const script = document.createElement("script");
        script.src = new URL(`runs/${id}.js`, STATIC);
        script.onload = () => done(window.memlabRuns[id]);
        script.onerror = () => {
          loading.delete(id);
          failed(new Error(`The file of the run ${id} did not load: load the page again.`));
        };
        document.head.append(script);
      });
      loading.set(id, loaded);
    }
    return loading.get(id);
  }

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children.filter((child) => child != null));
    return element;
  }

  function figure(html) {
    const holder = make("div");
    holder.innerHTML = html.replaceAll("memlab-uid", `run-figure-${++serial}`);
    return holder;
  }

  function showGib(gib, signed = false) {
    const size = Math.abs(gib);
    const text = size > 0 && size < 0.1 ? `${(size * 1024).toFixed(0)} MiB` : `${size.toFixed(2)} GiB`;
    return (gib < 0 ? "−" : signed ? "+" : "") + text;
  }

  function byValue(one, other) {
    const difference = Number(one) - Number(other);
    return Number.isNaN(difference) ? one.localeCompare(other) : difference;
  }

  class RunBrowser {
    constructor(place, number) {
      this.key = number ? String(number + 1) : "";
      const { runs, start } = window.memlabLabs[place.dataset.lab];
      this.runs = runs;
      this.chosen = this.run(start);
      this.kept = null;
      this.open = false;
      this.turn = 0;
      const taught = (place.dataset.teaches ?? "").split(/\s+/).filter(Boolean);
      const all = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
      const varied = all.filter((name) => new Set(runs.map((run) => this.setting(run, name))).size > 1);
      this.taught = taught.filter((name) => varied.includes(name));
      this.names = [...this.taught, ...varied.filter((name) => !taught.includes(name))];
      this.build(place, taught.filter((name) => all.includes(name) && !varied.includes(name)));
      this.readFragment();
      window.addEventListener("hashchange", () => this.readFragment());
    }

    run(id) {
      return this.runs.find((run) => run.id === id);
    }

    setting(run, name) {
      return run.settings[name] ?? "unset";
    }

    build(place, constant) {
      this.place = place;
      this.selects = new Map(this.names.map((name) => [name, make("select", { name })]));
      for (const [name, select] of this.selects) {
        select.addEventListener("change", () => this.choose(name, select.value));
      }
      const control = (name) => {
        const text = name in LABELS || !name.includes("_") ? LABELS[name] ?? name : make("code", {}, name);
        return make("label", {}, make("span", {}, text), this.selects.get(name));
      };
      const group = (names) => make("div", { className: "memlab-controls" }, ...names.map(control));
      const others = this.names.filter((name) => !this.taught.includes(name));
      const same = constant.map((name) => `${name} ${this.setting(this.chosen, name)}`).join(", ");
      this.compare = make("button", { type: "button" });
      this.compare.addEventListener("click", () => (this.open ? this.keep() : this.reveal()));
      this.status = make("p", { className: "memlab-status" });
      this.status.setAttribute("role", "status");
      this.shown = make("div", { className: "memlab-shown" });
      place.replaceChildren(
        make(
          "fieldset",
          {},
          make("legend", {}, `Replay a recorded run of lab ${place.dataset.lab}`),
          this.taught.length ? group(this.taught) : null,
          this.taught.length && others.length ? make("p", {}, "Other settings") : null,
          group(others),
          same ? make("p", {}, `The same in every run: ${same}.`) : null,
          this.compare,
          this.status,
        ),
        this.shown,
      );
    }

    // The recorded run with this value that keeps most of what is chosen now: what the lab teaches counts twice.
    nearest(name, value) {
      const weight = (other) => (other === "repeat" ? 0.1 : this.taught.includes(other) ? 2 : 1);
      const moved = (run) =>
        this.names
          .filter((other) => other !== name && this.setting(run, other) !== this.setting(this.chosen, other))
          .reduce((sum, other) => sum + weight(other), 0);
      const fitting = this.runs.filter((run) => this.setting(run, name) === value);
      return fitting.reduce((best, run) => (moved(run) < moved(best) ? run : best));
    }

    choose(name, value) {
      const before = this.chosen;
      this.chosen = this.nearest(name, value);
      const moved = this.changes(before, this.chosen).filter((change) => change.name !== name);
      const words = moved.map((change) => `${LABELS[change.name] ?? change.name} from ${change.from} to ${change.to}`);
      this.say(
        words.length
          ? `No run is recorded with that alone changed. The nearest also changes ${words.join(", ")}.`
          : `${this.open ? "Shown" : "Chosen"}: ${this.chosen.title}.`,
      );
      if (this.open) this.writeFragment();
      this.show();
    }

    // Nothing is shown before the reader asks: the page may ask for a prediction first.
    reveal() {
      this.open = true;
      this.say(`Shown: ${this.chosen.title}.`);
      this.writeFragment();
      this.show();
    }

    keep() {
      this.kept = this.kept ? null : this.chosen;
      this.say(
        this.kept
          ? `Kept: ${this.kept.title}. Choose another run, and it is shown beside this one.`
          : `Shown alone: ${this.chosen.title}.`,
      );
      this.writeFragment();
      this.show();
    }

    changes(one, other) {
      return this.names
        .map((name) => ({ name, from: this.setting(one, name), to: this.setting(other, name) }))
        .filter((change) => change.from !== change.to);
    }

    say(text) {
      this.status.textContent = text;
    }

    readFragment() {
      const fragment = new URLSearchParams(location.hash.slice(1));
      const chosen = this.run(fragment.get(`run${this.key}`));
      if (chosen) {
        this.chosen = chosen;
        this.kept = this.run(fragment.get(`with${this.key}`)) ?? null;
        this.open = true;
        this.place.scrollIntoView();
      }
      this.show();
    }

    // Replaced, not pushed: the way back leads off the page, not through each choice.
    writeFragment() {
      const fragment = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
      fragment.set(`run${this.key}`, this.chosen.id);
      if (this.kept) fragment.set(`with${this.key}`, this.kept.id);
      else fragment.delete(`with${this.key}`);
      history.replaceState(history.state, "", `#${fragment}`);
    }

    fillSelects() {
      for (const [name, select] of this.selects) {
        const values = [...new Set(this.runs.map((run) => this.setting(run, name)))].sort(byValue);
        const alone = (value) => this.changes(this.chosen, this.nearest(name, value)).every((c) => c.name === name);
        const option = (value) => make("option", { value }, value);
        const far = values.filter((value) => !alone(value));
        select.replaceChildren(...values.filter(alone).map(option));
        if (far.length) select.append(make("optgroup", { label: "changes other settings too" }, ...far.map(option)));
        select.value = this.setting(this.chosen, name);
      }
    }

    async show() {
      const turn = ++this.turn;
      const kept = this.kept && this.kept !== this.chosen ? this.kept : null;
      this.fillSelects();
      this.compare.textContent = !this.open ? "Show this run" : this.kept ? "Stop comparing" : "Keep this run to compare";
      if (!this.open) return;
      try {
        const entries = [kept, this.chosen].filter(Boolean);
        const loaded = await Promise.all(entries.map((entry) => load(entry.id)));
        if (turn !== this.turn) return;
        const name = (index) => (kept ? `${index ? "Chosen" : "Kept"}: ${entries[index].title}` : entries[index].title);
        const cards = loaded.map((run, index) => this.card(run, name(index)));
        const figures = [0, 1].map((kind) => {
          const drawn = loaded.map((run, index) => this.labelled(run.figures[kind], kept && name(index)));
          return make("div", { className: "memlab-pair" }, ...drawn);
        });
        const differences = kept ? this.differences(entries, loaded) : null;
        this.shown.replaceChildren(
          ...[make("div", { className: "memlab-pair" }, ...cards), differences, ...figures].filter(Boolean),
        );
      } catch (error) {
        this.shown.replaceChildren(make("p", {}, error.message));
      }
    }

    labelled(html, name) {
      if (!html) return null;
      return make("div", {}, name ? make("p", { className: "memlab-run-name" }, name) : null, figure(html));
    }

    card(run, name) {
      const id = `run-name-${++serial}`;
      const facts = run.facts.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value)));
      const command = make("code", {}, run.command);
      const copied = make("span", {});
      copied.setAttribute("role", "status");
      const copy = make("button", { type: "button" }, "Copy the command");
      copy.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(run.command);
          copied.textContent = " Copied.";
        } catch {
          getSelection().selectAllChildren(command);
          copied.textContent = " Selected: press Ctrl+C.";
        }
      });
      const links = make("p", {}, make("a", { href: new URL(run.page, ROOT) }, "Ledger, facts and log of this run"));
      if (run.download) {
        links.append(" · ", make("a", { href: new URL(run.download, ROOT), download: "" }, "Its record (JSON)"));
      }
      const card = make(
        "section",
        {},
        make("p", { id, className: "memlab-run-name" }, name),
        make("p", {}, `Replayed from the record: ${run.where}`),
        make("dl", {}, ...facts),
        run.error ? make("p", {}, run.error) : null,
        make("pre", {}, command),
        make("p", {}, copy, copied),
        links,
      );
      card.setAttribute("aria-labelledby", id);
      return card;
    }

    differences(entries, loaded) {
      const [before, after] = loaded.map((run) => new Map(run.terms));
      const header = ["term and view", "kept", "chosen", "difference"];
      const rows = [...new Set([...before.keys(), ...after.keys()])].map((term) => {
        const [from, to] = [before.get(term), after.get(term)];
        const known = from !== undefined && to !== undefined;
        const change = !known ? "" : Math.abs(to - from) < 0.005 ? "none" : showGib(to - from, true);
        return [term, ...[from, to].map((gib) => (gib === undefined ? "" : showGib(gib))), change];
      });
      const [from, to] = loaded.map((run) => run.tokens);
      if (from && to) {
        const change = from === to ? "none" : `${to < from ? "−" : "+"}${Math.abs(to - from).toLocaleString("en")}`;
        rows.push(["tokens in the KV cache", from.toLocaleString("en"), to.toLocaleString("en"), change]);
      }
      const heads = header.map((text) => make("th", { scope: "col" }, text));
      const body = rows.map(([term, ...cells]) =>
        make("tr", {}, make("th", { scope: "row" }, term), ...cells.map((cell) => make("td", {}, cell))),
      );
      const settings = this.changes(...entries).map((c) => `${LABELS[c.name] ?? c.name} ${c.from} and ${c.to}`);
      const table = make(
        "table",
        {},
        make("caption", {}, "By term; the difference is chosen less kept"),
        make("thead", {}, make("tr", {}, ...heads)),
        make("tbody", {}, ...body),
      );
      const holder = make("div", { className: "memlab-table", tabIndex: 0 }, table);
      holder.setAttribute("role", "group");
      holder.setAttribute("aria-label", "Differences by term");
      return make("div", {}, make("p", {}, `They differ in ${settings.join(", ")}.`), holder);
    }
  }

  // The page of recorded runs: a section unfolds when a link leads to it, and draws its figures then.
  function unfold() {
    const id = decodeURIComponent(location.hash.slice(1));
    const details = id && document.getElementById(id)?.querySelector(":scope > details[data-run]");
    if (details) details.open = true;
  }

  async function drawOnce(event) {
    const details = event.target;
    details.removeEventListener("toggle", drawOnce);
    const run = await load(details.dataset.run);
    details.querySelector("summary").after(...run.figures.map(figure));
  }

  document.addEventListener("DOMContentLoaded", () => {
    const places = document.querySelectorAll(".memlab-browser[data-lab]");
    const known = [...places].filter((place) => place.dataset.lab in (window.memlabLabs ?? {}));
    known.forEach((place, number) => new RunBrowser(place, number));
    for (const details of document.querySelectorAll("details[data-run]")) details.addEventListener("toggle", drawOnce);
    window.addEventListener("hashchange", unfold);
    unfold();
  });
})();
