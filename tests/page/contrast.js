// SPDX-License-Identifier: Apache-2.0
// Texts whose contrast with what lies behind them is below what WCAG asks: 4.5 to 1, 3 to 1 where they are big.
(() => {
  const parse = (colour) => {
    const numbers = colour.match(/[\d.]+/g).map(Number);
    const full = numbers.length > 3 ? numbers : [...numbers, 1];
    return colour.startsWith("color(srgb") ? full.map((v, i) => (i < 3 ? v * 255 : v)) : full;
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, c) => below.map((v, i) => c[i] * c[3] + v * (1 - c[3])), [255, 255, 255]);
  };
  const left = "svg, .hidden, script, style, noscript, button:disabled, option";
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || element.closest(left) || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const [high, low] = [luminance(parse(style.color)), luminance(behind(element))].sort((x, y) => y - x);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 18.6 ? 3 : 4.5)) poor.push([element.textContent.trim().slice(0, 40), ratio.toFixed(2)]);
  }
  return poor;
})()
