// Where a system has no locale, a browser's language can be one that no formatter takes, such as
// "en-US@posix"; uPlot formats by it as soon as it is loaded.
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
