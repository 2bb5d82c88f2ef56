"""The style sheet of the page: light and dark as the reader's system says, tables that stack on a narrow screen."""

CSS = """
:root{color-scheme:light dark;--bg:#fff;--soft:#f4f5f7;--ink:#1c2430;--dim:#5a6675;--rule:#d5dae1;--link:#0b57a4;
--good:#136c36;--good-bg:#e2f4e8;--bad:#a51524;--bad-bg:#fbe4e6;--open:#7a4d00;--open-bg:#fdf0d4}
@media(prefers-color-scheme:dark){:root{--bg:#12161c;--soft:#1b212a;--ink:#e3e8ee;--dim:#9aa6b4;--rule:#343d4a;
--link:#7db8f5;--good:#7fd6a0;--good-bg:#143322;--bad:#ff9aa4;--bad-bg:#43191e;--open:#f3c673;--open-bg:#3d2f10}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:24px 20px 64px;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
h1{font-size:1.9rem;line-height:1.2;margin:.1em 0 .4em;overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:2.2em 0 .5em;padding-top:.6em;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:1.2em 0 .3em}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-999px}.skip:focus{left:8px;top:8px;background:var(--bg);padding:6px 10px}
.kicker{margin:0;color:var(--dim);letter-spacing:.04em}
.lead{max-width:75ch}
code,.chart text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font-size:.86em;overflow-wrap:anywhere}
.hash{color:var(--dim)}
small{color:var(--dim);font-size:.82rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:1em 0}
dt{color:var(--dim)}dd{margin:0;min-width:0;max-width:90ch}
nav ul{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;margin:1em 0 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;margin:.6em 0}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{text-align:left;vertical-align:top;padding:7px 12px 7px 0;border-bottom:1px solid var(--rule);font-weight:400}
thead th{color:var(--dim);font-size:.85rem;white-space:nowrap}
th[scope=row]{min-width:15ch;max-width:34ch}
.figures td:nth-child(n+4){text-align:right;font-variant-numeric:tabular-nums}
.figures th:nth-child(n+4){text-align:right}
.figures td:nth-child(2){white-space:nowrap}
.answers{margin:.25em 0 0;color:var(--dim);font-size:.82rem}
.none{color:var(--dim)}
.badge{display:inline-block;padding:0 8px;border-radius:10px;font-size:.82rem;font-weight:600;white-space:nowrap;
background:var(--soft);color:var(--dim)}
.badge.proved{background:var(--good-bg);color:var(--good)}
.badge.refuted{background:var(--bad-bg);color:var(--bad)}
.badge.unknown{background:var(--open-bg);color:var(--open)}
.false{color:var(--bad)}
details{margin:.7em 0}
summary{cursor:pointer;padding:4px 0}
details.case{border:1px solid var(--rule);border-radius:8px;padding:6px 16px}
details.case summary span:last-child{color:var(--dim)}
.objection{background:var(--soft);border-left:4px solid var(--bad);padding:2px 16px 8px;margin:1em 0}
.steps td:nth-child(n+2){font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.82rem}
.chart{display:block;font-size:12px}
.chart text{fill:var(--ink);font-size:11px}
.chart .lane{font-weight:700;font-size:12px;text-anchor:middle}
.chart .side{text-anchor:start;font-weight:400;fill:var(--dim)}
.chart .outside{font-style:italic;font-weight:400}
.chart .life{stroke:var(--rule)}
.chart .said{stroke:var(--ink);stroke-width:1.5}.chart .done{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:5 3}
.chart .tip,.chart .dot{fill:var(--ink)}
.chart .label{paint-order:stroke;stroke:var(--bg);stroke-width:4px;font-size:11.5px}
.chart .mid{text-anchor:middle}.chart .end{text-anchor:end}
.chart .number{fill:var(--dim);text-anchor:end}
.chart .change{fill:var(--dim)}
.chart .rule{stroke:var(--rule);stroke-width:.5}
.chart .bracket{fill:none;stroke:var(--bad);stroke-width:2}.chart .loop{fill:var(--bad)}
@media(max-width:760px){
body{padding:16px 14px 48px}
dl{grid-template-columns:1fr;gap:0}dt{margin-top:8px}
table,tbody,tr,td,th{display:block}thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
tr{border-bottom:1px solid var(--rule);padding:8px 0}
th,td,.figures td:nth-child(n+4){border:0;padding:2px 0;text-align:left}
td[data-head]:not(:empty)::before{content:attr(data-head) ": ";color:var(--dim);font-size:.82rem}
td:empty{display:none}
details.case{padding:6px 10px}
}
@media print{details>*{display:block}.scroll{overflow:visible}}
"""
