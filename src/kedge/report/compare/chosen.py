"""The part of a comparison that a filter selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kedge.compare.alignment.modules import RecordedModule
from kedge.compare.alignment.sites import Alignment
from kedge.compare.comparison import Comparison
from kedge.errors import NoSuchSite
from kedge.sites.filters import chosen_sites
from kedge.store.recording import SiteInfo


def chosen_part(comparison: Comparison, text: str) -> Comparison:
    """Return a comparison with the chosen sites and their modules alone; either recording's names will do.

    Args:
        comparison: The comparison.
        text: A text of the site language; see Note [Words] in `kedge.sites.filters`.

    Raises:
        NoSuchSite: A part of the text selects nothing, or all of it only what cannot be compared.
        SelectorError: The text cannot be read.
    """
    chosen = {
        id(site)
        for site in chosen_sites(
            text, (*comparison.a.sites, *comparison.b.sites), "these recordings"
        )
    }
    whole = comparison.alignment
    places = [
        i for i, same in enumerate(whole.sites) if id(same.a) in chosen or id(same.b) in chosen
    ]
    if not places:
        raise NoSuchSite(
            f'"{text}" selects nothing that both recordings have; "**" selects everything'
        )
    sites = tuple(whole.sites[i] for i in places)
    kept = {id(same.module) for same in sites}
    part = Alignment(
        modules=tuple(same for same in whole.modules if id(same) in kept),
        sites=sites,
        only_a=_with(whole.only_a, chosen),
        only_b=_with(whole.only_b, chosen),
        sites_a=_of(whole.sites_a, chosen),
        sites_b=_of(whole.sites_b, chosen),
    )
    return replace(
        comparison, alignment=part, apart=comparison.apart[places], which=comparison.which[places]
    )


def _with(modules: Sequence[RecordedModule], chosen: set[int]) -> tuple[RecordedModule, ...]:
    return tuple(module for module in modules if _of(module.sites, chosen))


def _of(sites: Sequence[SiteInfo], chosen: set[int]) -> tuple[SiteInfo, ...]:
    return tuple(site for site in sites if id(site) in chosen)
