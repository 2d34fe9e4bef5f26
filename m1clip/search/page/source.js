// Where the page gets its images from: the server. A static page has another file of this name, with the same functions.

export const canUpload = true;

async function fetchJSON(path, options) {
  let response;
  try { response = await fetch(path, options); } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server does not answer. Is it still running?");
  }
  if (response.ok) return await response.json();
  let message = await response.text();
  try { message = JSON.parse(message).detail ?? message; } catch { /* not JSON */ }
  throw new Error(String(message).slice(0, 300).replace(/^./u, (first) => first.toUpperCase()));
}

const address = (kind, {row, version}) => `api/${kind}/${row}` + (version ? `?v=${version}` : "");

export const facts = () => fetchJSON("api/library");

/** Results from `offset` on; `upload` is an image file or null. */
export function search(query, upload, {offset, count, signal}) {
  const parameters = new URLSearchParams({offset, top_k: count});
  for (const [name, value] of Object.entries(query)) if (value !== "" && value != null) parameters.set(name, value);
  return fetchJSON(`api/search?${parameters}`, upload ? {method: "POST", body: upload, signal} : {signal});
}

export const thumbnail = (result) => address("thumbnail", result);

/** The address of the original; null if there is only the thumbnail. */
export const original = (result) => address("image", result);
