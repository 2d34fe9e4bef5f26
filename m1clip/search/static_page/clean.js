// What tokenizer.py does to a text before it is cut into tokens, except the repair of wrong encodings ("Ã¼").

const LIGATURES = {"Ĳ": "IJ", "ĳ": "ij", "ŉ": "ʼn", "Ǳ": "DZ", "ǲ": "Dz", "ǳ": "dz", "Ǆ": "DŽ", "ǅ": "Dž", "ǆ": "dž", "Ǉ": "LJ", "ǈ": "Lj",
  "ǉ": "lj", "Ǌ": "NJ", "ǋ": "Nj", "ǌ": "nj", "ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "ſt", "ﬆ": "st"};
const WINDOWS_1252 = new TextDecoder("windows-1252");
const PUNCTUATION = /[!-/:-@[-`{-~]/g;

/** The character that an entity such as &amp; or &#228; stands for; other text as it is. Nothing of it is shown as HTML. */
const decodeEntity = (entity) => new DOMParser().parseFromString(entity, "text/html").documentElement.textContent;

const unescapeHtml = (text) => text.replace(/&(#\d{1,7}|#x[\da-f]{1,6}|[a-z][a-z\d]{1,31});?/gi, decodeEntity);

const joinWords = (text) => text.replace(/\s+/g, " ").trim();

function cleanWhiteSpace(text) {
  if (!/^[ -~]*$/.test(text) || text.includes("&")) {
    text = text
      .replace(/[\u0080-\u009f]/g, (c) => WINDOWS_1252.decode(Uint8Array.of(c.charCodeAt(0))))
      .replace(/[Ĳĳŉ\u01c4-\u01cc\u01f1-\u01f3\ufb00-\ufb06]/g, (c) => LIGATURES[c])
      .replace(/[\uff01-\uffef]/g, (c) => c.normalize("NFKC"))
      .replace(/[\u02bc\u2018-\u201b]/g, "'")
      .replace(/[\u201c-\u201f]/g, '"')
      .replace(/[\0-\x08\x0b\x0e-\x1f\x7f\u206a-\u206f\ufeff\ufff9-\ufffc]/g, "")
      .normalize("NFC");
    text = unescapeHtml(unescapeHtml(text));
  }
  return joinWords(text);
}

const stripPunctuation = (text) => joinWords(text.toLowerCase().replace(PUNCTUATION, ""));

const CLEANERS = {
  none: (text) => text,
  lower: (text) => cleanWhiteSpace(text).toLowerCase(),
  whitespace: cleanWhiteSpace,
  canonicalize: (text) => stripPunctuation(cleanWhiteSpace(text).replaceAll("_", " ")),
  strip_punctuation: stripPunctuation,
};

export const cleanText = (text, kind) => CLEANERS[kind](text);
