/* Guides first: what a reader does comes before names of the reference and before evidence. */
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([docname, title, anchor, description, score]) => {
    const weights = [
      [/^(howto|tutorials)\//, 2],
      [/^(start|parts)\//, 1.6],
      [/^(understand|found)\//, 1.3],
      [/^(reference|_modules)\//, 0.6],
      [/^(artifact|developers)\//, 0.4],
    ];
    const found = weights.find(([pattern]) => pattern.test(docname));
    return score * (found ? found[1] : 1);
  },
};

/* Sphinx shows the pages that have all words. Below them come pages that have most of them, and
   entries of the index (docs/synonyms.toml) that share words with the query; rare words count more. */
{
  const withAllWords = Search._performSearch;
  const stemmed = (text) =>
    splitQuery(text.toLowerCase()).filter((word) => !stopwords.includes(word))
      .map((word) => new Stemmer().stemWord(word));

  const partial = (terms, excluded) => {
    const { docnames, filenames, titles, indexentries } = Search._index;
    const hits = new Map([...terms].map(
      (term) => [term, Search.performTermsSearch(new Set([term]), excluded)],
    ));
    const rarity = (term) => Math.log(1 + docnames.length / (1 + (hits.get(term) || []).length));
    const total = [...terms].reduce((sum, term) => sum + rarity(term), 0);
    const share = (words) =>
      [...terms].filter((term) => words.has(term)).reduce((sum, term) => sum + rarity(term), 0) / total;
    const pages = new Map();
    hits.forEach((results, term) => results.forEach((result) => {
      const page = pages.get(result[0]) || { result: [...result], words: new Set() };
      pages.set(result[0], { result: page.result, words: page.words.add(term) });
    }));
    const found = [...pages.values()].filter(({ words }) => share(words) > 0.5)
      .map(({ result, words }) => [...result.slice(0, 4), 5 * share(words), ...result.slice(5)]);
    for (const [entry, places] of Object.entries(indexentries)) {
      const words = new Set(stemmed(entry));
      const common = share(words) * [...words].filter((word) => terms.has(word)).length / words.size;
      if (common < 0.4) continue;
      for (const [file, id, isMain] of places) {
        if (isMain) {
          found.push([docnames[file], titles[file], "#" + id, null, 60 * common, filenames[file],
            SearchResultKind.index]);
        }
      }
    }
    return found.map((result) => result.with(4, Scorer.score(result)));
  };

  Search._performSearch = (query, terms, excluded, highlighted, objects) => {
    const all = withAllWords(query, terms, excluded, highlighted, objects);
    const seen = new Set(all.map((result) => result[0] + result[2]));
    const rest = partial(terms, excluded).filter((result) => !seen.has(result[0] + result[2]));
    // The last is shown first.
    return [...rest, ...all].sort((one, other) => one[4] - other[4]);
  };
}
