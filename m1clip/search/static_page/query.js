// Queries, as in query.py: terms with weights, and their sum as a unit vector.

const QUOTED = `(?:"[^"]*"|'[^']*'|“[^”]*”|„[^“”]*[“”]|«[^»]*»)`;
const MAX_WEIGHT = 1e6;

/** The terms of `dog + 0.5 * "snow at night" - person`. Operators stand between spaces; quotes hide them. */
export function parseQuery(query) {
  const parts = [], signs = [1];
  let start = 0;
  for (const found of query.matchAll(new RegExp(`(${QUOTED})|\\s+([+-])\\s+`, "g"))) {
    if (!found[2]) continue;
    parts.push(query.slice(start, found.index));
    signs.push(found[2] === "+" ? 1 : -1);
    start = found.index + found[0].length;
  }
  parts.push(query.slice(start));
  const terms = parts.map((part, index) => parseTerm(part, signs[index]));
  if (!terms.some(({weight}) => weight > 0)) throw new Error("The query has nothing to look for, only to avoid.");
  return terms;
}

function parseTerm(part, sign) {
  const [, factor, quoted, plain] = part.match(new RegExp(`^\\s*(?:(\\d+(?:\\.\\d+)?)\\s*[*×]\\s*)?(?:(${QUOTED})|(.*?))\\s*$`, "s"));
  const text = (quoted ? quoted.slice(1, -1) : plain).trim();
  if (!text) throw new Error("An operator in the query has no text beside it.");
  const weight = Number(factor ?? 1);
  if (weight > MAX_WEIGHT) throw new Error(`A weight in the query must be at most ${MAX_WEIGHT.toLocaleString("en")}.`);
  return {weight: sign * weight, text};
}

export function addTerms(weights, vectors) {
  const sum = new Float32Array(vectors[0].length);
  vectors.forEach((vector, term) => vector.forEach((value, i) => { sum[i] += weights[term] * value; }));
  const norm = Math.hypot(...sum);
  if (!(norm > 1e-6)) throw new Error("The terms of the query cancel each other.");
  return sum.map((value) => value / norm);
}
