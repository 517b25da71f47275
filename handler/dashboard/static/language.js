// On a system without a locale, the browser's language may be invalid for formatters, such as
// "en-US@posix"; uPlot uses it as soon as it is loaded.
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
