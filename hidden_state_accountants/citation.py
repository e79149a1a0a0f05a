"""The papers that the theorems come from."""

from __future__ import annotations

from collections.abc import Iterable

import attrs


@attrs.frozen
class Citation:
    """Where a bound comes from."""

    authors: str
    theorem: str
    arxiv: str | None = None

    def __str__(self) -> str:
        source = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f"{self.authors}, {self.theorem}{source}"


def bibtex(citations: Iterable[Citation]) -> str:
    """The BibTeX entries of the papers, each once, and of this package."""
    papers = dict.fromkeys(c.arxiv for c in citations if c.arxiv)
    entries = [_entry(*_PAPERS[paper], paper) for paper in papers]
    return "\n\n".join([*entries, _SOFTWARE])


def _entry(key: str, authors: str, title: str, venue: str, year: int, arxiv: str) -> str:
    kind, field = ("article", "journal") if "Journal" in venue else ("inproceedings", "booktitle")
    if not venue:
        kind, field, venue = "misc", "howpublished", "arXiv preprint"
    return (
        f"@{kind}{{{key},\n"
        f"  author = {{{authors}}},\n"
        f"  title = {{{title}}},\n"
        f"  {field} = {{{venue}}},\n"
        f"  year = {{{year}}},\n"
        f"  eprint = {{{arxiv}}},\n"
        "  archivePrefix = {arXiv},\n"
        "}"
    )


_ICML, _NEURIPS, _ICLR = (
    "International Conference on Machine Learning",
    "Advances in Neural Information Processing Systems",
    "International Conference on Learning Representations",
)
_PAPERS = {
    "1808.06651": (
        "feldman2018privacy",
        "Feldman, Vitaly and Mironov, Ilya and Talwar, Kunal and Thakurta, Abhradeep",
        "Privacy Amplification by Iteration",
        "IEEE Symposium on Foundations of Computer Science",
        2018,
    ),
    "1905.02383": (
        "dong2022gaussian",
        "Dong, Jinshuo and Roth, Aaron and Su, Weijie J.",
        "Gaussian Differential Privacy",
        "Journal of the Royal Statistical Society: Series B",
        2022,
    ),
    "2102.05855": (
        "chourasia2021differential",
        "Chourasia, Rishav and Ye, Jiayuan and Shokri, Reza",
        "Differential Privacy Dynamics of {L}angevin Diffusion and Noisy Gradient Descent",
        _NEURIPS,
        2021,
    ),
    "2110.03620": (
        "papernot2022hyperparameter",
        "Papernot, Nicolas and Steinke, Thomas",
        "Hyperparameter Tuning with R{\\'e}nyi Differential Privacy",
        _ICLR,
        2022,
    ),
    "2203.05363": (
        "ye2022differentially",
        "Ye, Jiayuan and Shokri, Reza",
        "Differentially Private Learning Needs Hidden State (Or Much Faster Convergence)",
        _NEURIPS,
        2022,
    ),
    "2205.13710": (
        "altschuler2022privacy",
        "Altschuler, Jason M. and Talwar, Kunal",
        "Privacy of Noisy Stochastic Gradient Descent: More Iterations without More Privacy Loss",
        _NEURIPS,
        2022,
    ),
    "2311.14632": (
        "zhang2024differentially",
        "Zhang, Xinwei and Bu, Zhiqi and Wu, Zhiwei Steven and Hong, Mingyi",
        "Differentially Private {SGD} Without Clipping Bias: An Error-Feedback Approach",
        _ICLR,
        2024,
    ),
    "2403.00278": (
        "bok2024shifted",
        "Bok, Jinho and Su, Weijie J. and Altschuler, Jason M.",
        "Shifted Interpolation for Differential Privacy",
        _ICML,
        2024,
    ),
    "2407.05237": (
        "kong2025privacy",
        "Kong, Weiwei and Ribero, M{\\'o}nica",
        "Privacy of the Last Iterate in Cyclically-Traversed {DP-SGD} on Nonconvex Composite "
        "Losses",
        "",
        2025,
    ),
    "2407.08233": (
        "chen2025hidden",
        "Chen, Ding and Liu, Chen",
        "Hidden State Differential Private Mini-Batch Block Coordinate Descent for "
        "Multi-convexity Optimization",
        "",
        2025,
    ),
    "2410.01068": (
        "chien2025convergent",
        "Chien, Eli and Li, Pan",
        "Convergent Privacy Loss of Noisy-{SGD} without Convexity and Smoothness",
        _ICLR,
        2025,
    ),
}
_SOFTWARE = """@software{hidden_state_accountants,
  author = {{The hidden-state-accountants developers}},
  title = {hidden-state-accountants: differential privacy of the last iterate},
  year = {2026},
}"""
