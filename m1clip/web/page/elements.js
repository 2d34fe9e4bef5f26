// Elements and numbers for all pages. Text from outside is only ever appended as text, never as HTML.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "boolean") element[name] = value;
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const integer = (value) => value == null ? "–" : value.toLocaleString("en");
