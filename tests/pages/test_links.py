"""Every relative link of every Markdown page leads to a file, every anchor to a heading."""

import repo_pages


def test_links_lead_somewhere(subtests):
    for page in repo_pages.pages():
        with subtests.test(page=page):
            for link in repo_pages.links(page.read_text(encoding="utf-8")):
                path, _, anchor = link.partition("#")
                target = page.parent / path if path else page
                assert target.exists(), f"{link} leads nowhere"
                assert target.resolve().is_relative_to(repo_pages.ROOT), (
                    f"{link} leads out of the repository"
                )
                if anchor and target.suffix == ".md":
                    assert anchor in repo_pages.anchors(target.read_text(encoding="utf-8")), (
                        f"{link}: {target.name} has no such heading"
                    )


def test_a_page_of_the_guide_begins_with_what_it_does(subtests):
    for page in sorted((repo_pages.ROOT / "docs/guide").glob("*.md")):
        with subtests.test(page=page):
            title, opening, *_ = page.read_text(encoding="utf-8").split("\n\n")
            assert title.startswith("# ") and "\n" not in title
            assert not opening.startswith("For "), opening[:80]


def test_anchors_are_githubs():
    text = "# One\n\n## What `it` is, and [why](x.md)?\n\n## One\n\n```\n# no heading\n```\n"
    assert repo_pages.anchors(text) == {"one", "what-it-is-and-why", "one-1"}


def test_what_counts_as_a_link():
    text = '[a](b.md) `[c](d.md)` ![e](f.svg) <img src="g.png"> [h](https://x.org) [i](#j)'
    assert repo_pages.links(text) == ["b.md", "f.svg", "g.png", "#j"]
