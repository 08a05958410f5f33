// The animated block table: what memlabBlockPool's scheduler does with a pool, drawn. book/_ext/block_table.py puts its
// place and its first state into the page; where no script runs, that stays.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const TOKENS = 160; // of the pool, whatever the block size: the memory is the same, cut differently
  const ROW = 16; // tokens
  const CELL = 20; // a token's width
  const HEIGHT = 36; // a row's
  const TOP = 74; // of the pool, under the bar of the GPU's memory
  const GAP = 4;
  const STEP_MS = 500;
  const SETTLED_MS = 700; // longer than a step: a run is heard when it pauses
  const BLOCK_SIZES = [4, 8, 16];
  const COLOURS = ["#0b6fd0", "#e8440a", "#008f7a", "#a044cc", "#a87b00"];
  const MARKS = [null, "M-1 7L7-1", "M0 3H6M3 0V6", "M3 0V6"];
  const DEVICE = [["weights", 80], ["activation", 74], ["pool", 88], ["headroom", 78]]; // widths: no measure

  const SYSTEM_PROMPT = Array.from({ length: 20 }, (_, index) => `system ${index}`);
  const PROMPTS = {
    short: { label: "short: 11 tokens", shared: [], own: 11, answer: 20 },
    long: { label: "long: 43 tokens", shared: [], own: 43, answer: 24 },
    system: { label: "shares the system prompt: 20 + 7", shared: SYSTEM_PROMPT, own: 7, answer: 24 },
  };
  // Where the picture starts, and what is printed.
  const START = [
    ["add", "short"], ["add", "long"], ["step"], ["add", "system"], ["step"],
    ["finish", "A"], ["add", "system"], ["step"], ["step"],
  ];

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children.filter((child) => child != null));
    return element;
  }

  function draw(tag, attributes = {}, ...children) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children.filter((child) => child != null));
    return element;
  }

  function chip(text, kind = "") {
    return make("span", { className: `chip ${kind}`.trim() }, text);
  }

  // With spaces between, for who hears or copies them.
  function spaced(parts) {
    return parts.flatMap((part) => [part, " "]);
  }

  function count(number, word) {
    return `${number} ${word}${number === 1 ? "" : "s"}`;
  }

  function letter(serial) {
    const round = Math.floor(serial / 26);
    return String.fromCharCode(65 + (serial % 26)) + (round ? round + 1 : "");
  }

  // A scheduler, the requests that it was given, and what its last step did.
  class Server {
    constructor(blockSize, prefixCaching) {
      const blocks = TOKENS / blockSize;
      this.scheduler = new globalThis.memlabBlockPool.Scheduler({ blocks, blockSize, prefixCaching });
      this.names = [];
      this.steps = 0;
      for (const [what, given] of START) this[what](given);
    }

    get requests() {
      return [...this.scheduler.running, ...this.scheduler.waiting];
    }

    add(kind) {
      const { shared, own, answer } = PROMPTS[kind];
      const added = letter(this.names.length);
      const tokens = (length, word) => Array.from({ length }, (_, index) => `${added} ${word} ${index}`);
      const prompt = [...shared, ...tokens(own, "prompt")];
      this.names.push(added);
      this.scheduler.add({ name: added, prompt, answer: tokens(answer, "answer") });
      return `Request ${added} is in the queue: ${count(prompt.length, "token")}. The next step admits it if it fits.`;
    }

    finish(finished) {
      const held = this.requests.find((request) => request.name === finished).blocks.length;
      const freed = this.scheduler.finish(finished);
      if (!held) return `Request ${finished} leaves the queue. It held no block.`;
      const kept = freed.filter((block) => block.hash !== null).length;
      const said = [`Request ${finished} is finished: ${count(freed.length, "block")} free again`];
      if (kept) said.push(`${kept} of them still cached`);
      if (held > freed.length) said.push(`${held - freed.length} held on by others`);
      return `${said.join(", ")}.`;
    }

    step() {
      if (!this.requests.length) return "There is no request: add one.";
      this.steps += 1;
      const { admitted, preempted, finished, blocked } = this.scheduler.step();
      const said = [`Step ${this.steps}.`];
      for (const { request, freed, lacking } of preempted) {
        const victim = request === lacking ? "it was admitted last, and" : `request ${request.name}, admitted last,`;
        said.push(
          `No block is free for the next token of request ${lacking.name}: ${victim} is preempted. ` +
            `That frees ${count(freed.length, "block")}, and request ${request.name} is first in the queue.`,
        );
      }
      if (preempted.length) said.push("A step that preempts admits nobody.");
      for (const { request, found, computed } of admitted) {
        const cached = found ? `${count(found, "token")} from the cache, ` : "";
        const again = request.preempted ? " again" : "";
        said.push(`Request ${request.name} runs${again}: ${cached}${count(computed, "token")} computed.`);
      }
      if (blocked) {
        const needed = count(blocked.needed, "block");
        said.push(`Request ${blocked.request.name} waits: ${needed} needed, ${blocked.free} free.`);
      }
      for (const request of finished) said.push(`Request ${request.name} has its answer and gives its blocks back.`);
      if (said.length === 1) said.push("Each running request has computed one more token.");
      return said.join(" ");
    }
  }

  // ---- what is drawn of a server ----

  class Picture {
    constructor(server, prefix, selected) {
      Object.assign(this, { server, prefix, selected });
      this.scheduler = server.scheduler;
    }

    fill(pattern) {
      return `url(#${this.prefix}-${pattern})`;
    }

    // Five colours and four marks: twenty requests in a row differ.
    patterns() {
      const inUse = this.server.requests.map((request) => {
        const serial = this.server.names.indexOf(request.name);
        const mark = MARKS[serial % MARKS.length];
        return draw(
          "pattern",
          { id: `${this.prefix}-${request.name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
          draw("rect", { width: 6, height: 6, fill: COLOURS[serial % COLOURS.length] }),
          mark && draw("path", { d: mark, class: "mark" }),
        );
      });
      const cached = draw(
        "pattern",
        { id: `${this.prefix}-cached`, width: 4, height: 4, patternUnits: "userSpaceOnUse" },
        draw("circle", { cx: 2, cy: 2, r: 0.9, fill: "currentColor" }),
      );
      return draw("defs", {}, ...inUse, cached);
    }

    device() {
      const parts = [];
      let x = 0;
      for (const [part, width] of DEVICE) {
        if (part === "pool") {
          const used = (width * this.scheduler.pool.usage).toFixed(1);
          parts.push(
            draw("rect", { x, y: 20, width: used, height: 22, class: "in-use" }),
            draw("path", { d: `M${x} 42L0 ${TOP - 4}M${x + width} 42L320 ${TOP - 4}`, class: "zoom" }),
          );
        }
        parts.push(
          draw("rect", { x, y: 20, width, height: 22, class: part === "headroom" ? "untaken" : "taken" }),
          draw("text", { x: x + width / 2, y: 35, "text-anchor": "middle" }, part),
        );
        x += width;
      }
      return draw("g", {}, draw("text", { x: 0, y: 12 }, "GPU memory: the same at every step"), ...parts);
    }

    // A block holds tokens of its owners, of nobody any more (cached), or none.
    block(block) {
      const { blockSize, running } = this.scheduler;
      const owners = running.filter((request) => request.blocks.includes(block));
      const kind = block.id === 0 ? "null" : owners.length ? "held" : block.hash === null ? "free" : "cached";
      const index = owners[0]?.blocks.indexOf(block);
      const names = owners.map((request) => request.name);
      const labels = {
        null: "null",
        held: `${names.length > 2 ? `${names[0]}+${names.length - 1}` : names.join()}[${index}]`,
        free: "",
        cached: "cached",
      };
      const width = blockSize * CELL - GAP;
      const x = ((block.id * blockSize) % ROW) * CELL + GAP / 2;
      const y = TOP + Math.floor((block.id * blockSize) / ROW) * HEIGHT;
      const slot = (width - 4) / blockSize;
      const band = (tokens, fill, place = 0, of = 1) => {
        const [top, height] = [y + 17 + (12 * place) / of, 12 / of].map((size) => size.toFixed(1));
        return draw("rect", { x: x + 2, y: top, width: (tokens * slot).toFixed(1), height, fill });
      };
      const held = kind === "held" ? Math.min(blockSize, owners[0].computed - index * blockSize) : 0;
      const ends = Array.from({ length: blockSize - 1 }, (_, token) => (x + 2 + (token + 1) * slot).toFixed(1));
      const slots = ends.map((end) => `M${end} ${y + 17}v12`).join("");
      return draw(
        "g",
        { class: names.includes(this.selected) ? `${kind} selected` : kind },
        draw("rect", { x, y, width, height: HEIGHT - GAP, class: "block" }),
        draw("text", { x: x + 4, y: y + 13 }, labels[kind]),
        draw("text", { x: x + width - 4, y: y + 13, "text-anchor": "end", class: "number" }, String(block.id)),
        ...owners.map((request, place) => band(held, this.fill(request.name), place, owners.length)),
        kind === "cached" ? band(blockSize, this.fill("cached")) : null,
        kind === "null" ? null : draw("path", { d: slots, class: "slots" }),
      );
    }

    pool() {
      const { pool, blockSize } = this.scheduler;
      const cached = pool.free.filter((block) => block.hash !== null).length;
      const label =
        `The pool: ${count(pool.blocks.length, "block")} of ${blockSize} tokens. ` +
        `${pool.blocks.length - 1 - pool.free.length} are held by requests, ${pool.free.length} are free, ` +
        `${cached} of these still cached. ` +
        "Block 0 is never given out. The tables say which request holds which block.";
      const height = TOP + (TOKENS / ROW) * HEIGHT;
      const viewBox = `-1 0 322 ${height}`;
      return draw(
        "svg",
        { viewBox, role: "img", "aria-label": label, fill: "currentColor", "font-family": "sans-serif" },
        this.patterns(),
        this.device(),
        ...pool.blocks.map((block) => this.block(block)),
      );
    }

    counters() {
      const { pool, running, waiting, preemptions, wasted, queries, hits } = this.scheduler;
      const usable = pool.blocks.length - 1;
      const pairs = [
        ["KV cache usage", `${(100 * pool.usage).toFixed(1)} % (${usable - pool.free.length} of ${usable} blocks)`],
        ["running", running.length],
        ["waiting", waiting.length],
        ["preemptions", preemptions],
        ["empty slots in last blocks", count(wasted, "token")],
        ["prefix cache hits", `${hits} of ${count(queries, "token")}`],
      ];
      return make(
        "dl",
        {},
        ...pairs.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, String(value)))),
      );
    }

    swatch(request) {
      const swatch = draw("rect", { width: 14, height: 14, fill: this.fill(request.name) });
      return draw("svg", { viewBox: "0 0 14 14", width: 14, height: 14, "aria-hidden": "true" }, swatch);
    }

    tables() {
      const rows = this.scheduler.running.map((request) => {
        const chips = request.blocks.map((block, index) => {
          const shared = block.references > 1 ? ` ×${block.references}` : "";
          return chip(`${index}→${block.id}${shared}`);
        });
        const row = make(
          "tr",
          {},
          make("th", { scope: "row" }, this.swatch(request), ` ${request.name}`),
          make("td", {}, String(request.computed)),
          make("td", {}, ...spaced(chips)),
        );
        if (request.name === this.selected) row.className = "selected";
        return row;
      });
      const head = ["request", "tokens", "logical→physical block"].map((text) => make("th", { scope: "col" }, text));
      const none = make("tr", {}, make("td", { colSpan: 3 }, "No request is running."));
      return make(
        "table",
        {},
        make("caption", {}, "Block tables (×2: held by two requests)"),
        make("thead", {}, make("tr", {}, ...head)),
        make("tbody", {}, ...(rows.length ? rows : [none])),
      );
    }

    queues() {
      const { waiting, pool } = this.scheduler;
      const queued = waiting.map((request) => {
        const needed = this.scheduler.required(request, this.scheduler.cachedBlocks(request));
        const before = request.preempted ? ", preempted" : "";
        return chip(`${request.name}: ${count(needed, "block")} needed${before}`);
      });
      const free = pool.free.map(({ id, hash }) => (hash === null ? chip(id) : chip(`${id} cached`, "cached")));
      const line = (title, chips, none) =>
        make("p", {}, make("strong", {}, title), " ", ...(chips.length ? spaced(chips) : [none]));
      return [
        line("Waiting, first in front:", queued, "nobody."),
        line("Free queue, next in front:", free, "empty."),
      ];
    }

    parts() {
      return [
        make("div", { className: "pool" }, this.pool()),
        make("div", {}, this.counters(), this.tables(), ...this.queues()),
      ];
    }
  }

  // ---- the controls ----

  class BlockTable {
    constructor(place, number) {
      this.prefix = `block-table-${number}`;
      this.state = place.querySelector(".memlab-block-state");
      this.timer = null;
      this.build(place);
      this.restart();
      this.show();
      const still = matchMedia("(prefers-reduced-motion: reduce)");
      const animate = () => {
        if (still.matches) this.pause();
        this.run.hidden = still.matches;
      };
      still.addEventListener("change", animate);
      animate();
      window.addEventListener("beforeprint", () => this.show(new Server(8, true), null));
      window.addEventListener("afterprint", () => this.show());
    }

    build(place) {
      const button = (name, text, act) => {
        const made = make("button", { type: "button", name }, text);
        made.addEventListener("click", act);
        return made;
      };
      const row = (...controls) => make("div", { className: "memlab-row" }, ...controls);
      const labelled = (text, control) => make("label", {}, make("span", {}, text), control);
      const choose = (options) =>
        make("select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
      this.prompt = choose(Object.entries(PROMPTS).map(([kind, { label }]) => [kind, label]));
      this.request = choose([]);
      this.blockSize = choose(BLOCK_SIZES.map((size) => [size, `${size} tokens`]));
      this.blockSize.value = 8;
      this.caching = make("input", { type: "checkbox", checked: true });
      const add = button("add", "Add request", () => this.act("add", this.prompt.value));
      const finish = button("finish", "Finish", () => this.act("finish", this.request.value));
      this.run = button("run", "Run", () => (this.timer ? this.pause() : this.start()));
      this.request.addEventListener("change", () => this.show());
      const renew = () => {
        this.restart();
        const { pool, blockSize, prefixCaching } = this.server.scheduler;
        const blocks = count(pool.blocks.length, "block");
        this.say(`Started anew: ${blocks} of ${blockSize} tokens, prefix caching ${prefixCaching ? "on" : "off"}.`);
      };
      this.blockSize.addEventListener("change", renew);
      this.caching.addEventListener("change", renew);
      this.said = make("p", { className: "memlab-status" });
      this.said.setAttribute("aria-hidden", "true");
      this.heard = make("p", { className: "memlab-heard" });
      this.heard.setAttribute("role", "status");
      place.prepend(
        make(
          "fieldset",
          {},
          make("legend", {}, "Fill the pool"),
          make(
            "div",
            { className: "memlab-controls" },
            row(labelled("prompt", this.prompt), add),
            row(button("step", "Step", () => this.act("step")), this.run, button("reset", "Reset", renew)),
            row(labelled("request", this.request), finish),
            row(labelled("block size", this.blockSize), make("label", {}, this.caching, " prefix caching")),
          ),
          this.said,
          this.heard,
        ),
      );
      this.said.textContent = "Add a request, then step: one step computes a prompt, or one token of each answer.";
    }

    restart() {
      this.pause();
      this.server = new Server(Number(this.blockSize.value), this.caching.checked);
    }

    act(what, given) {
      if (what === "finish" && !given) this.say("There is no request: add one.");
      else this.say(this.server[what](given));
    }

    start() {
      this.run.textContent = "Pause";
      this.timer = setInterval(() => {
        this.act("step");
        if (!this.server.requests.length) this.pause();
      }, STEP_MS);
    }

    pause() {
      clearInterval(this.timer);
      this.timer = null;
      this.run.textContent = "Run";
    }

    // What is said is seen at once, and heard when nothing new has been said for a while.
    say(text) {
      this.said.textContent = text;
      clearTimeout(this.settling);
      this.settling = setTimeout(() => (this.heard.textContent = text), SETTLED_MS);
      this.show();
    }

    show(server = this.server, selected = this.offerRequests()) {
      this.state.replaceChildren(...new Picture(server, this.prefix, selected).parts());
    }

    // The requests that can be finished; the chosen one stays chosen while it is there. A list that is open stays open.
    offerRequests() {
      const names = this.server.requests.map((request) => request.name).sort();
      const chosen = names.includes(this.request.value) ? this.request.value : names[0] ?? "";
      if (names.join() !== this.offered) {
        const offered = names.length ? names.map((value) => [value, value]) : [["", "none"]];
        this.request.replaceChildren(...offered.map(([value, text]) => make("option", { value }, text)));
        this.request.value = chosen;
        this.offered = names.join();
      }
      return chosen;
    }
  }

  document.addEventListener("DOMContentLoaded", () => {
    const places = document.querySelectorAll(".memlab-block-table");
    places.forEach((place, number) => new BlockTable(place, number));
  });
})();
