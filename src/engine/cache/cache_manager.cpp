#include "engine/cache/cache_manager.h"

namespace tandem {

CacheManager::CacheManager(const CacheSpec& spec, std::int64_t num_pages, std::int64_t page_size,
                           std::int64_t num_slots, Device& device)
    : pages_(spec.latent_widths, spec.latent_format, num_pages, page_size, device),
      slots_(spec.state_layers, num_slots, device) {
  buffers_.num_slots = num_slots;
  buffers_.num_pages = num_pages;
  buffers_.page_size = page_size;
  buffers_.state_layers = slots_.layers();
  buffers_.latent_layers = pages_.layers();
}

std::int64_t CacheManager::pages_for(std::int64_t num_tokens) const {
  return (num_tokens + page_size() - 1) / page_size();
}

bool CacheManager::open(SeqCache& seq, std::int64_t num_tokens) {
  TDM_CHECK(!seq.slot && seq.pages.empty() && seq.length == 0, seq.length);
  if (num_free_slots() == 0 || !extend(seq, num_tokens)) {
    return false;
  }
  seq.slot = slots_.take();
  return true;
}

bool CacheManager::open_fork(SeqCache& seq, std::int64_t num_tokens) {
  return open(seq, num_tokens % page_size() == 0 ? 0 : 1);
}

bool CacheManager::extend(SeqCache& seq, std::int64_t num_tokens) {
  const std::int64_t missing = pages_for(num_tokens) - isize(seq.pages);
  if (missing > num_free_pages()) {
    return false;
  }
  for (std::int64_t i = 0; i < missing; ++i) {
    seq.pages.push_back(pages_.take());
  }
  return true;
}

void CacheManager::fork(SeqCache& child, const SeqCache& parent) {
  TDM_CHECK(child.slot && parent.slot && child.length == 0, child.length);
  const std::int64_t num_full = parent.length / page_size();
  const bool has_tail = parent.length % page_size() != 0;
  TDM_CHECK(isize(child.pages) == (has_tail ? 1 : 0), child.pages.size(), parent.length);
  const auto end_of_full = parent.pages.begin() + num_full;
  child.pages.insert(child.pages.begin(), parent.pages.begin(), end_of_full);
  for (std::int64_t i = 0; i < num_full; ++i) {
    pages_.share(parent.pages[usize(i)]);
  }
  if (has_tail) {
    pages_.copy(child.pages.back(), parent.pages[usize(num_full)]);
  }
  slots_.copy(*child.slot, *parent.slot);
  child.length = parent.length;
}

void CacheManager::release(SeqCache& seq) {
  for (const PageId page : seq.pages) {
    pages_.release(page);
  }
  seq.pages.clear();
  if (seq.slot) {
    slots_.release(*seq.slot);
    seq.slot.reset();
  }
  seq.length = 0;
}

std::int64_t CacheManager::row_to_write(const SeqCache& seq, std::int64_t position) const {
  const PageId page = seq.pages[usize(position / page_size())];
  TDM_CHECK(pages_.refcount(page) == 1, index_of(page), pages_.refcount(page));
  return index_of(page) * page_size() + position % page_size();
}

void CacheManager::check_integrity(std::span<const SeqCache* const> live) const {
  pages_.check_integrity();
  slots_.check_integrity();
  std::vector<std::int32_t> references(usize(pages_.num_pages()), 0);
  std::vector<bool> slot_used(usize(slots_.num_slots()), false);
  std::int64_t num_slots = 0;
  for (const SeqCache* seq : live) {
    TDM_CHECK(seq->slot || (seq->pages.empty() && seq->length == 0), seq->length);
    TDM_CHECK(pages_for(seq->length) <= isize(seq->pages), seq->length, seq->pages.size());
    for (const PageId page : seq->pages) {
      ++references[usize(index_of(page))];
    }
    if (seq->slot) {
      TDM_CHECK(!slot_used[usize(index_of(*seq->slot))], index_of(*seq->slot));
      slot_used[usize(index_of(*seq->slot))] = true;
      ++num_slots;
    }
  }
  for (std::int64_t page = 0; page < pages_.num_pages(); ++page) {
    const PageId id{static_cast<std::int32_t>(page)};
    TDM_CHECK(references[usize(page)] == pages_.refcount(id), page, references[usize(page)],
              pages_.refcount(id));
  }
  TDM_CHECK(num_slots + slots_.num_free() == slots_.num_slots(), num_slots, slots_.num_free());
}

}  // namespace tandem
