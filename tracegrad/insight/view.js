(() => {
"use strict";
const STYLE = "@CSS@";
const CHUNK = 250;      // rows that are built at once; the rest follow when they come into sight
const MOST_HITS = 1000;
const KINDS = ["flows", "changed", "cut", "unreached", "none", "replaced", "unknown", "rule"];
const SAYS = {
  flows: "the gradient passes here",
  changed: "the gradient passes here, as a custom rule says",
  cut: "the gradient ends here: the data go on to an output, no gradient comes back",
  unreached: "no gradient arrives here: it ends further on, or nothing leads from here to an output",
  none: "nothing to differentiate: no float input leads here",
  replaced: "a custom rule stands for this when it is differentiated",
  unknown: "differentiated as a whole with the call around it",
  rule: "part of a custom rule: runs when the function is differentiated",
};
const LEGEND = [
  ["flows", "gradient flows"], ["changed", "changed by a custom rule"], ["cut", "ends here"],
  ["unreached", "none arrives"], ["recomputed", "recomputed"], ["custom", "◆ custom gradient"],
  ["stop", "■ stop gradient"], ["recompute", "↻ recompute"],
];
const SIGNS = {"◆": "custom", "■": "stop", "↻": "recompute"};
const CLASS = {recomputed: "recompute", custom: "changed", stop: "cut"};

// A node's entry is [results, label, operands, parameters, types, place, scope, kind, lost, regions].
const RESULTS = 0, LABEL = 1, OPERANDS = 2, PARAMETERS = 3, TYPES = 4, PLACE = 5, SCOPE = 6, KIND = 7,
  LOST = 8, REGIONS = 9;

function make(tag, name, ...content) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...content);  // strings become text: nothing of the user's is read as HTML
  return element;
}

const signOf = (row) => SIGNS[row[LABEL][0]] || "";

class View {
  constructor(host) {
    this.data = JSON.parse(host.querySelector("script").textContent);
    this.bodies = this.data.bodies;
    this.hits = [];
    this.at = -1;
    const light = getComputedStyle(host).color.match(/[\d.]+/g).slice(0, 3).map(Number);
    const root = host.attachShadow({mode: "open"});
    const style = make("style");
    style.textContent = STYLE;
    this.frame = make("div", "view");
    // Light text around it: a dark page, whatever made it dark.
    if (0.3 * light[0] + 0.6 * light[1] + 0.1 * light[2] > 140) this.frame.classList.add("dark");
    this.list = make("div", "hits");
    this.list.hidden = true;
    this.scroll = make("div", "scroll");
    this.tell = make("div", "tell");
    this.tell.hidden = true;
    this.frame.append(this.toolbar(), this.legend(), this.list, this.scroll, this.tell);
    root.append(style, this.frame);
    this.sight = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) entry.target.grow();
    }, {root: this.scroll, rootMargin: "400px"});
    this.top = new Body(this, 0, -1);
    this.scroll.append(this.top.element);
    if (this.count(0).nodes <= 40) while (this.unfold((item) => !item.row || signOf(item.row) !== "custom"));
    this.listen();
  }

  // What a body holds, all that is below it included, each occurrence counted.
  count(index) {
    const body = this.bodies[index];
    if (!body.count) {
      const sum = body.count = {nodes: 0};
      body.rows.forEach((row) => this.add(sum, this.countRow(body, row)));
    }
    return body.count;
  }

  countRow(body, row) {
    const sum = {nodes: 1};
    const inside = this.countRegions(row);
    // A cut inside a call is counted where it is.
    const kind = KINDS[row[KIND]];
    if (!(kind === "cut" && inside.cut)) sum[kind] = 1;
    if (signOf(row)) sum[signOf(row)] = 1;
    if (body.again) sum.recomputed = 1;
    return this.add(sum, inside);
  }

  // The parts of a rule are no part of the program.
  countRegions(row) {
    const isInRule = KINDS[row[KIND]] === "rule";
    return row[REGIONS].reduce((all, [, region, isRule]) => isRule && !isInRule ? all : this.add(all, this.count(region)), {nodes: 0});
  }

  add(sum, other) {
    for (const key in other) sum[key] = (sum[key] || 0) + other[key];
    return sum;
  }

  toolbar() {
    const bar = make("div", "bar");
    const total = this.count(0).nodes;
    const title = make("span", "title", this.data.name);
    title.title = this.data.name;
    this.box = make("input");
    this.box.type = "search";
    this.box.placeholder = "search: name, type, file:line";
    this.box.setAttribute("aria-label", "search");
    this.found = make("span", "faint");
    const unfold = make("button", "", "unfold");
    unfold.title = "one level more, everywhere";
    unfold.onclick = () => this.unfold();
    const fold = make("button", "", "fold");
    fold.onclick = () => { this.top.fold(); this.scroll.scrollTop = 0; };
    bar.append(title, make("span", "faint", `${total.toLocaleString("en")} operation${total === 1 ? "" : "s"}`),
      make("span", "space"), this.found, this.box, unfold, fold);
    return bar;
  }

  legend() {
    const legend = make("div", "legend");
    const count = this.count(0);
    for (const [key, words] of LEGEND) {
      if (!count[key]) continue;
      const chip = make("button", `chip ${CLASS[key] || key}`);
      if (!SIGNS[words[0]]) chip.append(make("i", key === "unreached" ? "open" : ""));
      chip.append(make("b", "", words), make("span", "faint", count[key].toLocaleString("en")));
      chip.title = `find them: is:${key}`;
      chip.onclick = () => {
        const query = `is:${key}`;
        this.box.value = this.box.value === query ? "" : query;
        this.search();
      };
      legend.append(chip);
    }
    return legend;
  }

  // Opens one level more of all that is in sight; says whether there was something to open.
  unfold(which = () => true) {
    const closed = this.top.closed().filter(which);
    closed.forEach((item) => item.open());
    return closed.length > 0;
  }

  // ---------------------------------------------------------------------------------- searching

  search() {
    const words = this.box.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.hits = [];
    this.at = -1;
    if (words.length) this.collect(0, words, [], -1, new Map());
    const more = this.hits.length === MOST_HITS ? "+" : "";
    this.found.textContent = words.length ? `${this.hits.length.toLocaleString("en")}${more} found` : "";
    this.list.replaceChildren(...this.hits.slice(0, 200).map((hit, k) => this.hitLine(hit, k)));
    if (this.hits.length > 200) this.list.append(make("div", "hit faint", "Enter goes on to the next one"));
    this.list.hidden = !this.hits.length;
  }

  text(body, row) {
    if (!row.text) {
      const place = row[PLACE] < 0 ? "" : this.data.places[row[PLACE]].slice(0, 2).join(" ");
      const kind = KINDS[row[KIND]];
      row.text = [row[RESULTS].join(" "), "=", row[LABEL], row[OPERANDS].join(" "), row[PARAMETERS], row[TYPES],
        this.data.scopes[row[SCOPE]].join("/"), place, `is:${kind}`, signOf(row) && `is:${signOf(row)}`,
        body.again ? "is:recomputed" : ""].join(" ").toLowerCase();
    }
    return row.text;
  }

  matches(body, row, words) {
    if (!words.every((word) => word.startsWith("is:")
      ? this.text(body, row).split(" ").includes(word) : this.text(body, row).includes(word))) return false;
    // A call in which the gradient ends is not where it ends.
    return !(words.includes("is:cut") && this.countRegions(row).cut);
  }

  collect(index, words, path, place, none) {
    if (none.has(index) || this.hits.length >= MOST_HITS) return;
    const before = this.hits.length;
    this.bodies[index].rows.forEach((row, i) => {
      if (this.hits.length >= MOST_HITS) return;
      const here = row[PLACE] < 0 ? place : row[PLACE];
      if (this.matches(this.bodies[index], row, words)) this.hits.push({index, path: [...path, i], place: here});
      row[REGIONS].forEach(([, region], k) => this.collect(region, words, [...path, i, k], here, none));
    });
    if (this.hits.length === before) none.set(index, true);  // a region entered often is searched once
  }

  hitLine(hit, k) {
    const line = make("div", "hit");
    const names = [];
    let body = this.bodies[0];
    for (let i = 0; i + 2 < hit.path.length; i += 2) {
      const row = body.rows[hit.path[i]];
      names.push(row[LABEL].split(" ").pop());
      body = this.bodies[row[REGIONS][hit.path[i + 1]][1]];
    }
    const row = body.rows[hit.path.at(-1)];
    names.push(...this.data.scopes[row[SCOPE]]);
    line.append(make("span", `say ${KINDS[row[KIND]]}`, `${row[RESULTS].join(", ")} = ${row[LABEL]}(${row[OPERANDS].join(", ")})`),
      make("span", "way", names.join(" › ")), make("span", "faint", hit.place < 0 ? "" : this.data.places[hit.place][0]));
    line.onclick = () => this.visit(k);
    return line;
  }

  visit(k) {
    if (!this.hits.length) return;
    this.at = (k + this.hits.length) % this.hits.length;
    for (const line of this.list.querySelectorAll(".now")) line.classList.remove("now");
    const line = this.list.children[this.at];
    if (line) { line.classList.add("now"); line.scrollIntoView({block: "nearest"}); }
    this.found.textContent = `${this.at + 1} of ${this.hits.length.toLocaleString("en")}${this.hits.length === MOST_HITS ? "+" : ""}`;
    this.mark(this.top.reveal(this.hits[this.at].path));
  }

  mark(element) {
    if (this.marked) this.marked.classList.remove("found");
    this.marked = element;
    element.classList.add("found");
    const box = element.getBoundingClientRect(), frame = this.scroll.getBoundingClientRect();
    if (box.top < frame.top || box.bottom > frame.bottom)
      this.scroll.scrollTop += box.top - frame.top - frame.height / 3;
  }

  // ------------------------------------------------------------------------------------- events

  listen() {
    let timer;
    this.box.oninput = () => { clearTimeout(timer); timer = setTimeout(() => this.search(), 120); };
    this.box.onkeydown = (event) => {
      event.stopPropagation();  // notebooks have keys of their own
      if (event.key === "Enter") {
        clearTimeout(timer);
        if (this.at < 0) this.search();
        this.visit(this.at + (event.shiftKey ? -1 : 1));
        event.preventDefault();
      } else if (event.key === "Escape") { this.box.value = ""; this.search(); }
    };
    this.scroll.onclick = (event) => {
      const name = event.target.closest(".v");
      const row = event.target.closest(".row");
      if (name && row && name.closest(".row") === row && !name.classList.contains("def")) this.define(name);
      else if (row && row.item && row.item.kids && !getSelection().toString()) row.item.toggle();
    };
    this.scroll.onmouseover = (event) => {
      const name = event.target.closest(".v");
      this.same(name);
      this.explain(event.target.closest(".row"));
    };
    this.scroll.onmouseleave = () => { this.same(null); this.explain(null); };
    this.scroll.onscroll = () => this.explain(null);
  }

  define(name) {
    const body = name.closest(".body").body;
    const i = body.data.rows.findIndex((row) => row[RESULTS].includes(name.dataset.v));
    if (i >= 0) this.mark(body.revealRow(i).element);
  }

  same(name) {
    if (name === this.name) return;
    this.name = name;
    for (const element of this.scroll.querySelectorAll(".same")) element.classList.remove("same");
    if (!name) return;
    const body = name.closest(".body");
    for (const element of body.querySelectorAll(`.v[data-v="${CSS.escape(name.dataset.v)}"]`))
      if (element.closest(".body") === body) element.classList.add("same");
  }

  explain(row) {
    if (row === this.told) return;
    this.told = row;
    clearTimeout(this.timer);
    this.tell.hidden = true;
    if (row && row.item && row.item.row) this.timer = setTimeout(() => this.show(row), 220);
  }

  show(element) {
    const {row, place, body} = element.item;
    const kind = KINDS[row[KIND]];
    this.tell.replaceChildren();
    if (place >= 0) {
      const [file, name, line] = this.data.places[place];
      this.tell.append(make("span", "", `${file} `), make("span", "faint", name ? `in ${name}` : ""));
      if (line) this.tell.append(make("code", "", line));
      else this.tell.append(make("br"));
    }
    const scope = this.data.scopes[row[SCOPE]];
    if (scope.length && !body.data.calls) this.tell.append(make("div", "faint", `scope ${scope.join("/")}`));
    if (row[TYPES].length > 16) this.tell.append(make("div", "faint", row[TYPES]));
    this.tell.append(make("div", kind, SAYS[kind]));
    if (row[LOST]) this.tell.append(make("div", "cut", `but none goes on to ${row[LOST]}`));
    if (body.data.again) this.tell.append(make("div", "recompute", "run again in the backward pass"));
    this.tell.hidden = false;
    const frame = this.frame.getBoundingClientRect(), box = element.getBoundingClientRect();
    const height = this.tell.offsetHeight;
    const below = box.bottom - frame.top + 4;
    const fits = below + height < frame.height;
    this.tell.style.top = `${fits ? below : Math.max(2, box.top - frame.top - height - 4)}px`;
    this.tell.style.left = `${Math.min(Math.max(8, box.left - frame.left + 22), Math.max(8, frame.width - this.tell.offsetWidth - 8))}px`;
  }
}

// A graph as one place enters it: heading, nodes, results.
class Body {
  constructor(view, index, place, title) {
    this.view = view;
    this.data = view.bodies[index];
    this.place = place;  // of the call, for nodes that have no line of their own
    this.element = make("div", "body");
    this.element.body = this;
    this.lists = [];
    const {rows} = this.data;
    this.items = this.grouped(rows);
    this.list = new List(this, this.items);
    this.element.append(this.head(title), this.list.element, this.results());
  }

  head(title) {
    const {name, inputs, constants} = this.data;
    const head = make("div", "head");
    if (title) head.append(make("span", "faint", `${title}: `));
    head.append(make("span", "fn", name), "(");
    const argument = ([text, type, reached], k) => {
      const part = make("span", "", k ? ", " : "", value(text, reached === 1 ? "flows" : reached === 0 ? "unreached" : ""),
        make("span", "faint", `: ${type}`));
      part.title = reached === 1 ? "a gradient arrives here" : reached === 0 ? "no gradient arrives here" : "";
      return part;
    };
    head.append(...someOf(inputs, argument));
    const {types} = this.data;
    const results = types.length > 12 ? `${types.slice(0, 8).join(", ")}, … ${types.length - 8} more` : types.join(", ");
    head.append(") → ", make("span", "faint", results || "()"));
    for (const [text, type] of constants) head.append(make("div", "faint", value(text), `: ${type} is a constant`));
    return head;
  }

  results() {
    const named = (name, k) => make("span", "", k ? ", " : "", value(name));
    return make("div", "return faint", "return ", ...someOf(this.data.out, named));
  }

  // Neighbours with a scope in common, or a function that was called, stand under it.
  grouped(rows) {
    const top = [];
    let path = [], stack = [top];
    rows.forEach((row, i) => {
      const scope = this.view.data.scopes[row[SCOPE]];
      let depth = 0;
      while (depth < path.length && depth < scope.length && path[depth] === scope[depth]) depth += 1;
      path = scope;
      stack.length = depth + 1;
      for (; depth < scope.length; depth += 1) {
        const group = {scope: scope[depth], items: [], first: i};
        stack[depth].push(group);
        stack.push(group.items);
      }
      stack[depth].push({index: i, first: i});
    });
    return this.data.calls ? this.worthwhile(top) : top;
  }

  // A call that comes to one operation, or is all there is, needs no line of its own.
  worthwhile(items) {
    return items.map((item) => {
      if (!item.items) return item;
      const inside = this.worthwhile(item.items);
      if (inside.length > 1 || !item.scope.includes(" (")) return {...item, items: inside};
      return inside[0];
    });
  }

  revealRow(i) {
    let list = this.list, item;
    do {
      let k = list.items.length - 1;
      while (list.items[k].first > i) k -= 1;
      item = list.item(k);
      if (item.group) { item.open(); list = item.lists[0]; }
    } while (item.group);
    return item;
  }

  reveal(path) {
    const item = this.revealRow(path[0]);
    if (path.length === 1) return item.element;
    item.open();
    return item.bodies[path[1]].reveal(path.slice(2));
  }

  closed() { return this.list.closed(); }
  fold() { this.list.fold(); }
}

// Items one below the other, built as far as somebody has looked.
class List {
  constructor(body, items) {
    this.body = body;
    this.items = items;
    this.built = [];
    this.element = make("div");
    this.grow();
  }

  grow() {
    const {body} = this;
    const end = Math.min(this.items.length, this.built.length + CHUNK);
    const part = document.createDocumentFragment();
    for (let k = this.built.length; k < end; k += 1) {
      const item = new Item(body, this.items[k]);
      this.built.push(item);
      part.append(item.element);
      if (item.inner) part.append(item.inner);
    }
    if (this.rest) this.rest.remove();
    this.element.append(part);
    const left = this.items.length - this.built.length;
    if (!left) return;
    if (!this.rest) {
      this.rest = make("button", "more");
      this.rest.grow = this.rest.onclick = () => this.grow();
    }
    this.rest.textContent = `… ${left.toLocaleString("en")} more`;
    this.element.append(this.rest);
    body.view.sight.unobserve(this.rest);  // observed anew, it tells again when it is still in sight
    body.view.sight.observe(this.rest);
  }

  item(k) {
    while (this.built.length <= k) this.grow();
    return this.built[k];
  }

  closed() { return this.built.flatMap((item) => item.closed()); }
  fold() { for (const item of this.built) item.fold(); }
}

class Item {
  constructor(body, source) {
    this.body = body;
    this.group = source.items ? source : null;
    this.row = this.group ? null : body.data.rows[source.index];
    this.lists = [];
    this.bodies = [];
    this.isOpen = false;
    this.kids = Boolean(this.group || this.row[REGIONS].length);
    this.place = !this.row || this.row[PLACE] < 0 ? body.place : this.row[PLACE];
    this.element = this.group ? this.scopeLine() : this.rowLine();
    this.element.item = this;
    if (this.kids) {
      this.inner = make("div", "kids");
      this.inner.hidden = true;
    }
  }

  line(kind, ...parts) {
    const fold = make(this.kids ? "button" : "span", "fold", this.kids ? "▸" : "");
    if (this.kids) { fold.setAttribute("aria-expanded", "false"); fold.setAttribute("aria-label", "unfold"); }
    this.triangle = fold;
    const again = this.body.data.again ? " again" : "";
    return make("div", `row ${kind}${again}${this.kids ? " folds" : ""}`, fold, ...parts);
  }

  scopeLine() {
    const {view, data} = this.body;
    const sum = {nodes: 0};
    const visit = (items) => items.forEach((item) => item.items ? visit(item.items)
      : view.add(sum, view.countRow(data, data.rows[item.index])));
    visit(this.group.items);
    const call = this.body.data.calls && this.group.scope.match(/^(.*?)( \(.*)$/);
    const [, name, place] = call || ["", this.group.scope, ""];
    const kind = sum.changed ? "changed" : sum.flows ? "flows" : sum.cut ? "cut" : sum.unreached ? "unreached" : "none";
    return this.line(`scope is-${sum.changed && sum.flows ? "flows" : kind}`,
      make("span", "say", make("span", "faint", call ? "ƒ " : "# "), make("span", "name", name), make("span", "faint", place)), this.badges(sum));
  }

  rowLine() {
    const {row, body} = this;
    const {view} = body;
    const say = make("span", "say");
    row[RESULTS].forEach((name, k) => say.append(k ? ", " : "", value(name, "", true)));
    say.append(row[RESULTS].length ? " = " : "_ = ", make("span", `op ${signOf(row)}`, row[LABEL]), "(");
    row[OPERANDS].forEach((name, k) => say.append(k ? ", " : "", value(name)));
    say.append(")");
    if (row[PARAMETERS]) say.append(make("span", "par", row[PARAMETERS]));
    const parts = [say];
    if (this.kids) {
      parts.push(this.badges(view.countRegions(row)));
    }
    const type = make("span", "type", row[TYPES]);
    // Of a long name the end is cut off, of the line number nothing.
    const [, file, number] = this.place < 0 ? ["", "", ""] : view.data.places[this.place][0].match(/^(.*?)(:\d+)?$/);
    const place = make("span", "place", make("span", "file", file), number || "");
    return this.line(`is-${KINDS[row[KIND]]}`, ...parts, type, place);
  }

  badges(sum) {
    const badges = make("span", "badges", sum.nodes ? sum.nodes.toLocaleString("en") : "");
    for (const [key, sign] of [["custom", "◆"], ["stop", "■"], ["recompute", "↻"], ["cut", "✕"]])
      if (sum[key]) badges.append(make("span", CLASS[key] || key, `${sign}${sum[key]}`));
    badges.title = `${sum.nodes} operations inside`;
    return badges;
  }

  open() {
    if (this.isOpen || !this.kids) return;
    if (!this.inner.firstChild) {
      if (this.group) {
        this.lists = [new List(this.body, this.group.items)];
        this.inner.append(this.lists[0].element);
      } else {
        this.bodies = this.row[REGIONS].map(([title, index]) => new Body(this.body.view, index, this.place, title));
        this.inner.append(...this.bodies.map((body) => body.element));
      }
    }
    this.set(true);
  }

  set(isOpen) {
    this.isOpen = isOpen;
    this.inner.hidden = !isOpen;
    this.triangle.textContent = isOpen ? "▾" : "▸";
    this.triangle.setAttribute("aria-expanded", String(isOpen));
  }

  toggle() { if (this.isOpen) this.set(false); else this.open(); }

  closed() {
    if (!this.kids) return [];
    if (!this.isOpen) return [this];
    return [...this.lists, ...this.bodies].flatMap((inside) => inside.closed());
  }

  fold() {
    for (const inside of [...this.lists, ...this.bodies]) inside.fold();
    if (this.isOpen) this.set(false);
  }
}

// Each of a list, made by `part` of it and its number; of a long one the first, and a button for the rest.
function someOf(list, part) {
  if (list.length <= 12) return list.map(part);
  const more = make("button", "chip", `… ${list.length - 8} more`);
  more.onclick = () => more.replaceWith(...list.slice(8).map((each) => part(each, 1)));
  return [...list.slice(0, 8).map(part), " ", more];
}

function value(name, kind, isDefinition) {
  const element = make("span", `v ${kind || ""}${isDefinition ? " def" : ""}`, name);
  element.dataset.v = name;
  return element;
}

for (const host of document.querySelectorAll("div.tracegrad-graph:not([data-ready])")) {
  host.dataset.ready = "";
  new View(host);
}
})();
