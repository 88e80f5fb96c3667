// Names for parts of the theme's pages that have none, and the keyboard's way into tables that scroll: axe-core asks for both.
function label(root) {
  root.querySelectorAll(".md-search:not([aria-label])").forEach((search) => search.setAttribute("aria-label", "Search"));
  root.querySelectorAll(".md-code__nav:not([aria-label])").forEach((nav, index) => {
    nav.setAttribute("aria-label", `Code block ${nav.closest("[id]")?.id.replace(/\D+/g, "") || index}`);
  });
  root.querySelectorAll(".md-nav[aria-labelledby]").forEach((nav) => {  // a section with a page of its own is named beside its label
    const name = document.getElementById(nav.getAttribute("aria-labelledby"));
    if (!name || name.textContent.trim()) return;
    nav.removeAttribute("aria-labelledby");
    nav.setAttribute("aria-label", name.parentElement.textContent.trim());
  });
  root.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((wrap) => wrap.setAttribute("tabindex", "0"));
}

new MutationObserver(() => label(document)).observe(document.body, { childList: true, subtree: true });
label(document);
