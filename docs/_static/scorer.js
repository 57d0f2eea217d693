/* The search ranks guides by how often they have a query's words (BM25, Robertson and Zaragoza 2009),
   and by headings and entries of the index (docs/synonyms.toml) that have them. `wordCounts` is written
   with the site (docs/conf.py). Sphinx's own search finds names of the reference. */
var Scorer = {
  objNameMatch: 15,
  objPartialMatch: 3,
  objPrio: { 0: 10, 1: 3, 2: -5 },
  objPrioDefault: 0,
  title: 4,
  partialTitle: 2,
  term: 2,
  partialTerm: 1,
};

{
  const ofSphinx = Search._performSearch;
  const folderWeights = { howto: 1.3, tutorials: 1.2, start: 1.2, parts: 1.2, developers: 0.7 };
  const stemmed = (text) =>
    splitQuery(text.toLowerCase()).filter((word) => !stopwords.includes(word))
      .map((word) => new Stemmer().stemWord(word));
  // Words of questions, and what all pages are about, tell no pages apart.
  const common = new Set(stemmed(
    "how what which who why when where do does can could should must i my me we our you your get "
      + "use using make any from about has have dp dpjax",
  ));

  /* The words of a query that pages have; "batchnorm" is two of them. */
  const known = (terms, vocabulary) => [...terms].flatMap((term) => {
    if (vocabulary.has(term)) return [term];
    for (let cut = 3; cut <= term.length - 3; cut++) {
      const halves = [term.slice(0, cut), term.slice(cut)];
      if (halves.every((half) => vocabulary.has(half))) return halves;
    }
    return [...vocabulary].filter((word) => word.startsWith(term)).slice(0, 1);
  });

  const guides = (terms) => {
    const { alltitles, docnames, filenames, indexentries, titles } = Search._index;
    const names = Object.keys(wordCounts);
    const pagesWith = new Map();
    const lengths = new Map();
    for (const name of names) {
      lengths.set(name, Object.values(wordCounts[name]).reduce((sum, count) => sum + count, 0));
      for (const word of Object.keys(wordCounts[name])) {
        pagesWith.set(word, 1 + (pagesWith.get(word) || 0));
      }
    }
    const meanLength = [...lengths.values()].reduce((sum, length) => sum + length, 0) / names.length;
    // Entries have words that no page has.
    const entryWords = Object.keys(indexentries).flatMap((entry) => stemmed(entry));
    const words = known(terms, new Set([...pagesWith.keys(), ...entryWords]));
    const rarity = (word) => Math.log(1 + names.length / (pagesWith.get(word) || 1));
    const total = words.reduce((sum, word) => sum + rarity(word), 0);
    const pages = new Map();
    for (const name of names) {
      const norm = 1.2 * (0.25 + 0.75 * lengths.get(name) / meanLength);
      const score = words.reduce((sum, word) => {
        const count = wordCounts[name][word] || 0;
        return sum + rarity(word) * count * 2.2 / (count + norm);
      }, 0);
      pages.set(name, { text: 10 * score / total, bonus: 0, anchor: "" });
    }
    // A heading or an entry counts by the share of the query that it has, and of its own words.
    const add = (text, places, weight) => {
      const own = new Set(stemmed(text));
      const both = words.filter((word) => own.has(word));
      const share = both.reduce((sum, word) => sum + rarity(word), 0) / total;
      const bonus = weight * share * both.length / own.size;
      for (const [file, id, isMain] of places) {
        const page = pages.get(docnames[file]);
        if (page && isMain !== false && bonus > page.bonus) {
          page.bonus = bonus;
          page.anchor = id ? "#" + id : "";
        }
      }
    };
    Object.entries(alltitles).forEach(([title, places]) => add(title, places, 15));
    Object.entries(indexentries).forEach(([entry, places]) => add(entry, places, 30));
    return [...pages].filter(([, { text, bonus }]) => text + bonus > 0).map(([name, { text, bonus, anchor }]) => {
      const file = docnames.indexOf(name);
      const score = (text + bonus) * (folderWeights[name.split("/")[0]] || 1);
      return [name, titles[file], anchor, null, score, filenames[file], SearchResultKind.text];
    });
  };

  Search._performSearch = (query, words, excluded, highlighted, objects) => {
    const telling = [...words].filter((word) => !common.has(word));
    const found = guides(telling.length ? new Set(telling) : words);
    const best = Math.max(0, ...found.map((result) => result[4]));
    const reference = ofSphinx(query, words, excluded, highlighted, objects)
      .filter(([name]) => name.startsWith("reference/"));
    // The last is shown first.
    return [...found.filter((result) => result[4] > 0.3 * best), ...reference]
      .sort((one, other) => one[4] - other[4]);
  };
}
