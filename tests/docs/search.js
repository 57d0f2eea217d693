// Ask the search of a built site as a browser does: node search.js SITE < queries.json > hits.json
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const site = process.argv[2];
const page = {
  document: { getElementById: () => null, addEventListener: () => {} },
  localStorage: { setItem: () => {} },
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
  _ready: () => {},
};
vm.createContext(page);
const files = [
  "_static/searchtools.js", "_static/language_data.js", "_static/word_counts.js", "searchindex.js",
];
for (const file of files) {
  vm.runInContext(fs.readFileSync(path.join(site, file), "utf8"), page);
}
page.queries = JSON.parse(fs.readFileSync(0, "utf8"));
// The site shows the last of the list first.
const hits = vm.runInContext(
  "queries.map((query) => Search._performSearch(...Search._parseQuery(query)).reverse())",
  page,
);
console.log(JSON.stringify(hits.map((found) => found.map(([name, , anchor]) => name + anchor))));
