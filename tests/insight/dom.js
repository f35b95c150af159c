// As much of a browser's document as `view.js` uses, for tests: what is not here is an error there.
// Lines are 20 pixels high, and what scrolls is 400 high.
"use strict";

class Node {
  constructor() { this.parentNode = null; this.childNodes = []; }
  remove() {
    if (this.parentNode) this.parentNode.childNodes.splice(this.parentNode.childNodes.indexOf(this), 1);
    this.parentNode = null;
  }
  append(...content) {
    for (const item of content.flatMap((node) => node instanceof Fragment ? [...node.childNodes] : [node])) {
      const node = item instanceof Node ? item : new Text(String(item));
      node.remove();
      node.parentNode = this;
      this.childNodes.push(node);
    }
  }
  replaceChildren(...content) { for (const node of [...this.childNodes]) node.remove(); this.append(...content); }
  replaceWith(...content) {
    const {parentNode} = this, after = parentNode.childNodes.slice(parentNode.childNodes.indexOf(this) + 1);
    this.remove();
    parentNode.append(...content, ...after);
  }
  get children() { return this.childNodes.filter((node) => node instanceof Element); }
  get firstChild() { return this.childNodes[0] || null; }
  get textContent() { return this.childNodes.map((node) => node.textContent).join(""); }
  set textContent(text) { this.replaceChildren(...text === "" ? [] : [text]); }
  * elements() { for (const child of this.children) { yield child; yield* child.elements(); } }
  querySelectorAll(selector) { return [...this.elements()].filter((element) => element.matches(selector)); }
  querySelector(selector) { return this.querySelectorAll(selector)[0] || null; }
}

class Text extends Node {
  constructor(text) { super(); this.text = text; }
  get textContent() { return this.text; }
}

class Fragment extends Node {}

class Element extends Node {
  constructor(tag) {
    super();
    Object.assign(this, {tagName: tag, className: "", hidden: false, dataset: {}, style: {}, attributes: {}, scrollTop: 0, value: ""});
    const names = () => this.className.split(/\s+/).filter(Boolean);
    this.classList = {
      contains: (name) => names().includes(name),
      add: (name) => { this.className = [...new Set([...names(), name])].join(" "); },
      remove: (name) => { this.className = names().filter((other) => other !== name).join(" "); },
    };
  }
  set innerHTML(text) { throw new Error("text was to be read as HTML"); }
  set outerHTML(text) { throw new Error("text was to be read as HTML"); }
  setAttribute(name, value) { this.attributes[name] = value; }
  attribute(name) { return name.startsWith("data-") ? this.dataset[name.slice(5)] : this.attributes[name]; }
  matches(selector) {
    let rest = selector;
    const take = (pattern, test) => {
      const found = rest.match(pattern);
      if (found) rest = rest.slice(found[0].length);
      return found && {fits: test(...found.slice(1))};
    };
    while (rest) {
      const part = take(/^(\w+)/, (tag) => this.tagName === tag)
        || take(/^\.([\w-]+)/, (name) => this.classList.contains(name))
        || take(/^\[([\w-]+)="((?:[^"\\]|\\.)*)"\]/, (name, value) => this.attribute(name) === value.replace(/\\(.)/g, "$1"))
        || take(/^\[([\w-]+)\]/, (name) => this.attribute(name) !== undefined)
        || take(/^:not\(([^)]*)\)/, (inner) => !this.matches(inner));
      if (!part) throw new Error(`no selector here: ${selector}`);
      if (!part.fits) return false;
    }
    return true;
  }
  closest(selector) {
    for (let node = this; node instanceof Element; node = node.parentNode) if (node.matches(selector)) return node;
    return null;
  }
  attachShadow() { const root = new Element("#shadow"); this.append(root); return root; }
  scrollIntoView() {}
  get isVisible() {
    for (let node = this; node instanceof Element; node = node.parentNode) if (node.hidden) return false;
    return true;
  }
  get offsetHeight() { return this.getBoundingClientRect().height; }
  get offsetWidth() { return this.getBoundingClientRect().width; }
  getBoundingClientRect() {
    const scroll = this.closest(".scroll");
    if (this === scroll || !scroll) return {top: 0, bottom: 400, height: 400, left: 0, width: 800};
    const top = 20 * scroll.querySelectorAll(".row").filter((row) => row.isVisible).indexOf(this) - scroll.scrollTop;
    return {top, bottom: top + 20, height: 20, left: 0, width: 800};
  }
}

const document = new Element("#document");
Object.assign(document, {
  createElement: (tag) => new Element(tag),
  createDocumentFragment: () => new Fragment(),
});
const window = globalThis;
globalThis.CSS = {escape: (text) => text.replace(/[^\w]/g, "\\$&")};
globalThis.color = "rgb(31, 35, 40)";  // of the text around a view
globalThis.getComputedStyle = () => ({color});
globalThis.getSelection = () => "";

const timers = new Map();
globalThis.setTimeout = (run, after) => { timers.set(timers.size + 1, {run, after}); return timers.size; };
globalThis.clearTimeout = (timer) => { if (timers.has(timer)) timers.get(timer).run = () => {}; };

const observed = new Map();
globalThis.IntersectionObserver = class {
  constructor(tell) { this.tell = tell; }
  observe(element) { observed.set(element, this); }
  unobserve(element) { observed.delete(element); }
};

// ------------------------------------------------------------------------ what tests do and look at

function addView(json, text) {
  const host = new Element("div"), script = new Element("script"), pre = new Element("pre");
  host.className = "tracegrad-graph";
  script.append(json);
  pre.append(text);
  host.append(script, pre);
  document.append(host);
}

function all(selector) {
  const [own, ...around] = selector.split(" ").reverse();
  return document.querySelectorAll(own).filter((element) => element.isVisible && around.every((one) => element.closest(one)));
}

function one(selector, text) {
  const says = (test) => all(selector).find((element) => test(element.textContent));
  const found = says((content) => content === text) || says((content) => content.includes(text));
  if (!found) throw new Error(`no ${selector} says ${text}; they are: ${texts(selector)}`);
  return found;
}

// Tells an element and those around it of an event.
function tell(target, kind, more = {}) {
  let goesOn = true;
  const event = {target, stopPropagation() { goesOn = false; }, preventDefault() {}, ...more};
  for (let node = target; node && goesOn; node = node.parentNode) if (node[kind]) node[kind](event);
}

const texts = (selector) => JSON.stringify(all(selector).map((element) => element.textContent));
const classes = (selector, text) => one(selector, text).className;
// The lines with as many dots as there are lines around each.
const lines = () => JSON.stringify(all(".row").map((row) => {
  let depth = 0;
  for (let inner = row.closest(".kids"); inner; inner = inner.parentNode.closest(".kids")) depth += 1;
  return ". ".repeat(depth) + row.querySelector(".say").textContent;
}));
const click = (selector, text) => tell(one(selector, text), "onclick");
const clickValue = (row, name) => tell(one(".row", row).querySelectorAll(".v").find((v) => v.textContent === name), "onclick");
const point = (row, name) => tell(name ? one(".row", row).querySelectorAll(".v").find((v) => v.textContent === name) : one(".row", row), "onmouseover");
const leave = () => tell(document.querySelector(".scroll"), "onmouseleave");
const press = (key, shiftKey) => tell(document.querySelector("input"), "onkeydown", {key, shiftKey});
const scrolled = () => document.querySelector(".scroll").scrollTop;
function write(text) { const box = document.querySelector("input"); box.value = text; tell(box, "oninput"); }
function wait() { const due = [...timers.values()]; timers.clear(); for (const {run} of due) run(); }
function scrollToEnd() {
  const due = [...observed];
  for (const [target, observer] of due) if (target.isVisible) observer.tell([{target, isIntersecting: true}]);
}
