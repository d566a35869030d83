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


def test_what_counts_as_a_link():
    text = '[a](b.md) `[c](d.md)` ![e](f.svg) <img src="g.png"> [h](https://x.org) [i](#j)'
    assert repo_pages.links(text) == ["b.md", "f.svg", "g.png", "#j"]
