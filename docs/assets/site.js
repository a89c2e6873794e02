// What the theme leaves out: names for its search, and tables that a keyboard can scroll.

// Where a pasted message names a file and a line, the search may take "my-model/f.py:9" for a
// question about a field, and find nothing; a word that begins with a dash would exclude pages.
const QUERY = 2;
// Other words for a page are its tags. The index keeps a tag as one word, without its dash.
const SYNONYMS = [
  [/\bzero[- ]?([123])\b/gi, "zero$1"],
  [/\bhf\b/gi, "huggingface"],
  [/\b(?:gradient|activation)[- ]checkpointing\b/gi, "gradientcheckpointing"],
];
const asWords = (query) => SYNONYMS.reduce((text, [words, tag]) => text.replace(words, tag), query)
  .replace(/[:^~]+|(?<!\S)[-+]+/g, " ");
const post = window.Worker.prototype.postMessage;
window.Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = message.type === QUERY;
  post.call(this, isQuery ? { ...message, data: asWords(message.data) } : message, ...rest);
};

function nameParts() {
  document.querySelector("#__search")?.setAttribute("aria-label", "Search");
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelector("#__drawer")?.setAttribute("aria-label", "Menu");
  const boxes = ".md-typeset__scrollwrap, .md-typeset pre > code, p:has(> img[src*='against-memory'])";
  for (const box of document.querySelectorAll(boxes)) {
    box.tabIndex = 0;
  }
}

document.addEventListener("DOMContentLoaded", () => {
  nameParts();
  new MutationObserver(nameParts).observe(document.body, { childList: true, subtree: true });
});
