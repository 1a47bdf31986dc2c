"use strict";
// Before anything is drawn: what was chosen on an earlier visit.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is forbidden here: as the system has it.
}
