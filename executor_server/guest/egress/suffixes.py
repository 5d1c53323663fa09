"""Public suffixes: anybody may register a name below one, so a wildcard there would cover strangers.

This is a short list, not the Public Suffix List, whose 10,000 lines change every week: the check is a guard-rail for
authors of policies. A wildcard below a missing suffix works as written.
"""

from __future__ import annotations

# Second levels that nearly every country with a second level has: co.uk, com.br, ac.jp, gov.in.
_USUAL = {"ac", "co", "com", "edu", "go", "gob", "gouv", "gov", "mil", "ne", "net", "or", "org"}

_OTHERS = """
    in-addr.arpa ip6.arpa
    gv.at
    asn.au id.au
    art.br blog.br eco.br ind.br inf.br jus.br leg.br nom.br tv.br
    br.com cn.com de.com eu.com gb.com jpn.com ru.com sa.com uk.com us.com za.com
    asso.fr nom.fr prd.fr tm.fr
    idv.hk
    biz.id desa.id my.id sch.id web.id
    idf.il k12.il muni.il
    firm.in gen.in ind.in nic.in res.in
    ad.jp ed.jp gr.jp lg.jp
    hs.kr pe.kr re.kr
    eu.org
    geek.nz gen.nz govt.nz health.nz iwi.nz kiwi.nz maori.nz school.nz
    info.pl waw.pl
    msk.ru spb.ru
    in.th mi.th
    bel.tr gen.tr k12.tr pol.tr web.tr
    club.tw ebiz.tw game.tw idv.tw
    in.ua kiev.ua kyiv.ua pp.ua
    ltd.uk me.uk nhs.uk plc.uk police.uk sch.uk
    law.za nom.za school.za web.za
"""
_KNOWN = frozenset(_OTHERS.split())


def is_public_suffix(host: str) -> bool:
    """True when strangers may register names directly below this one, which must be canonical."""
    labels = host.split(".")
    if len(labels) == 1:
        return True
    if len(labels) > 2:
        return False
    second, first = labels
    if first == "us" and len(second) == 2:  # its states: ca.us
        return True
    return host in _KNOWN or (len(first) == 2 and second in _USUAL)
