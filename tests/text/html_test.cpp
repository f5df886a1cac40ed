#include "text/html.h"

#include <array>

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(Html, EscapesWhatCouldBeATag) {
  EXPECT_EQ(escape_html("<b a='1' c=\"2\">&é\xFF"),
            "&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;é\xEF\xBF\xBD");
}

TEST(Html, FilledPartsAreNotSearchedAgain) {
  const std::array<PagePart, 2> parts = {{{"@A@", "@B@"}, {"@B@", "b"}}};
  EXPECT_EQ(fill_page("@A@-@B@-@A@ @C@ @", parts), "@B@-b-@B@ @C@ @");
}

}  // namespace
}  // namespace tandem
