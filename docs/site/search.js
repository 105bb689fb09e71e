// The search of `threefold find` for the site: the same entries, synonyms and ranking as threefold/lookup/search.py.
// A test compares the two. `data` is what build.py writes: entries as [kind, name, answer, text, page], and constants.

const spaced = (text) => " " + text.toLowerCase().replace(/[^a-z0-9+]+/g, " ").trim();

function stem(word) {
  for (const ending of ["ings", "ing", "ed", "es", "s", "e"])
    if (word.endsWith(ending) && word.length - ending.length >= 4) return word.slice(0, -ending.length);
  return word;
}

function words(text, stop) {
  const found = [];
  for (const word of text.toLowerCase().match(/[a-z0-9][a-z0-9_+.\-/]*/g) || []) {
    const parts = /[_.\-/]/.test(word) ? [word.replace(/[.-]+$/, ""), ...word.split(/[_.\-/]/)] : [word];
    for (const part of parts) if (part && !stop.has(part)) found.push(stem(part));
  }
  return [...new Set(found)];
}

function related(query, data) {
  const text = " " + query.toLowerCase().replace(/[^a-z0-9+_./-]+/g, " ") + " ";
  const weights = new Map();
  const groups = new Map(data.groups.flatMap((group) => group.map((phrase) => [phrase, group])));
  for (const [phrase, group] of groups) {
    if (!text.includes(` ${phrase} `)) continue;
    for (const other of group) {
      const isWhole = text.trim() === phrase;
      let weight = data.synonym;
      if (other === group[0] && (isWhole || phrase.includes(" "))) weight = isWhole ? 1.0 : data.certain;
      if (!text.includes(` ${other} `)) weights.set(other, Math.max(weight, weights.get(other) || 0));
    }
  }
  return weights;
}

function count(text, part) {
  let found = 0;
  for (let at = text.indexOf(part); at >= 0; at = text.indexOf(part, at + part.length)) found += 1;
  return found;
}

function find(query, data, most) {
  const stop = new Set(data.stop);
  const phrases = related(query, data);
  const isNamed = [...phrases.values()].includes(1.0);
  const weights = new Map(words(query, stop).map((word) => [word, isNamed ? 0.5 : 1.0]));
  for (const [phrase, weight] of phrases)
    for (const word of words(phrase, stop)) weights.set(word, Math.max(weight, weights.get(word) || 0));
  data.pool ||= data.entries.map((entry) => [entry, ...entry.slice(1, 4).map(spaced)]);
  const scores = data.pool.map(() => 0), own = data.pool.map(() => 0);
  for (const [word, weight] of weights) {
    const part = spaced(word);
    const hits = data.pool.map(([entry, name, answer, text]) => {
      const times = count(text, part);
      const inText = times ? Math.log1p(times) / (1 + text.length / data.long) : 0;
      const factor = entry[0] === "death" ? data.log : 1.0;
      return data.name * name.includes(part) + data.answer * answer.includes(part) + data.text * inText * factor;
    });
    const spread = Math.log(1 + hits.length / (1 + hits.filter((hit) => hit > 0).length));
    hits.forEach((hit, index) => {
      if (!hit) return;
      scores[index] += (weight * spread * hit) / (hit + 2.0);
      own[index] += weight === 1.0;
    });
  }
  const asked = [...weights.values()].filter((weight) => weight === 1.0).length || 1;
  const stems = [...weights.keys()].map((word) => spaced(word).slice(1));
  const normal = spaced(query);
  const ranked = data.pool.flatMap(([entry, name, answer], index) => {
    if (!scores[index]) return [];
    const last = spaced(entry[1].split(".").pop());
    const isBehind = entry[4].startsWith("log/") || entry[1].startsWith("--");
    const isName = !isBehind && [name, last, name.replace(" threefold", "")].includes(normal);
    const prior = isBehind ? data.behind : data.prior[entry[0]] ?? 1.0;
    const phrase = isName ? 3.0 : name.includes(normal) || answer.includes(normal) ? 1.25 : 1.0;
    const parts = name.split(" ").filter((part) => part && !stop.has(part));
    const said = parts.filter((part) => stems.some((one) => part.startsWith(one))).length;
    const share = parts.length ? said / parts.length : 0;
    const score = prior * scores[index] * (0.4 + (0.6 * own[index]) / asked) * (1 + 0.6 * share) * phrase;
    return [[score, entry]];
  });
  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  ranked.sort((a, b) => b[0] - a[0] || order(a[1][0], b[1][0]) || order(a[1][1], b[1][1]));
  return ranked.slice(0, most).map(([, entry]) => entry);
}

function show(box, list, data) {
  list.replaceChildren(
    ...find(box.value, data, 20).map(([kind, name, answer, , page]) => {
      const item = document.createElement("li");
      const link = document.createElement(page ? "a" : "b");
      if (page) link.href = page;
      link.textContent = name;
      item.append(link, ` (${kind}) ${answer}`);
      return item;
    }),
  );
}

if (typeof document !== "undefined") {
  const box = document.getElementById("find"), list = document.getElementById("found");
  fetch("_static/entries.json").then((answer) => answer.json()).then((data) => {
    box.addEventListener("input", () => show(box, list, data));
    show(box, list, data);
  });
} else {
  module.exports = { find };
}
