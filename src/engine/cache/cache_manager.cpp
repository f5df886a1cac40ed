#include "engine/cache/cache_manager.h"

#include <algorithm>

namespace tandem {

std::int64_t SeqCache::until_checkpoint(std::int64_t count) const {
  for (const std::int64_t at : checkpoint_at) {
    if (at > length) {
      count = std::min(count, at - length);
    }
  }
  return count;
}

CacheManager::CacheManager(const CacheSpec& spec, std::int64_t num_pages, std::int64_t page_size,
                           std::int64_t num_slots, Device& device, PrefixTreeLimits prefixes)
    : pages_(spec.latent_widths, spec.latent_format, num_pages, page_size, device),
      slots_(spec.state_layers, num_slots + prefixes.num_checkpoints, device),
      tree_(pages_, slots_, prefixes) {
  buffers_.num_slots = slots_.num_slots();
  buffers_.num_pages = num_pages;
  buffers_.page_size = page_size;
  buffers_.state_layers = slots_.layers();
  buffers_.latent_layers = pages_.layers();
}

std::int64_t CacheManager::pages_for(std::int64_t num_tokens) const {
  return (num_tokens + page_size() - 1) / page_size();
}

bool CacheManager::open(SeqCache& seq, std::int64_t num_tokens, const PrefixMatch& match,
                        std::int64_t spare) {
  TDM_CHECK(!seq.slot && seq.pages.empty() && seq.length == 0, seq.length);
  if (num_free_slots() == 0) {
    return false;
  }
  if (match.node) {
    tree_.lock(*match.node);  // so that it is not evicted for the pages of the rest
    seq.node = match.node;
    tree_.append_pages(seq.pages, *match.node);
  }
  if (!extend(seq, num_tokens, spare)) {
    release(seq);
    return false;
  }
  if (match.node) {
    tree_.touch(*match.node);
    seq.slot = slots_.take_copy(tree_.checkpoint(*match.node).value());
    seq.length = match.state_len;
  } else {
    seq.slot = slots_.take();
  }
  choose_checkpoints(seq, num_tokens, match.kv_len);
  return true;
}

void CacheManager::choose_checkpoints(SeqCache& seq, std::int64_t num_tokens,
                                      std::int64_t kv_len) const {
  // A prompt that shares all but d tokens with this one then computes at most some 2 d again. Each
  // of these costs the prefill a step, so a short prompt and a small pool have fewer.
  constexpr std::int64_t kLongPrompt = 32;  // blocks
  constexpr std::int64_t kSlotsOfOne = 8;   // of the pool
  const auto& [block, num_slots] = tree_.limits();
  if (block == 0) {
    return;
  }
  const std::int64_t last = (num_tokens - 1) / block * block;
  std::size_t count = 0;
  seq.checkpoint_at[count++] = kv_len;
  seq.checkpoint_at[count++] = last;
  if (num_tokens - seq.length < kLongPrompt * block) {
    return;
  }
  const std::size_t most = std::min(kMostCheckpoints, count + usize(num_slots / kSlotsOfOne));
  for (std::int64_t step = 2 * block, at = last - step; count < most && at > seq.length;
       step *= 2, at -= step) {
    seq.checkpoint_at[count++] = at;
  }
}

bool CacheManager::open_fork(SeqCache& seq, std::int64_t num_tokens, std::int64_t spare) {
  TDM_CHECK(!seq.slot && seq.pages.empty() && seq.length == 0, seq.length);
  const std::int64_t own = pages_for(num_tokens) - shared_pages(num_tokens);
  if (num_free_slots() == 0 || !extend(seq, own * page_size(), spare)) {
    return false;
  }
  seq.slot = slots_.take();
  return true;
}

bool CacheManager::extend(SeqCache& seq, std::int64_t num_tokens, std::int64_t spare) {
  const std::int64_t missing = std::max<std::int64_t>(pages_for(num_tokens) - isize(seq.pages), 0);
  if (missing + spare > num_available_pages()) {
    return false;
  }
  while (num_free_pages() < missing) {
    const bool evicted = tree_.evict();
    TDM_CHECK(evicted, num_free_pages(), missing);
  }
  for (std::int64_t i = 0; i < missing; ++i) {
    seq.pages.push_back(pages_.take());
  }
  return true;
}

void CacheManager::fork(SeqCache& child, SeqCache& parent) {
  TDM_CHECK(child.slot && parent.slot && child.length == 0, child.length);
  TDM_CHECK(!parent.has_drawn && !child.node);
  const std::int64_t num_shared = shared_pages(parent.length);
  const std::int64_t num_own = pages_for(parent.length) - num_shared;
  TDM_CHECK(isize(child.pages) == num_own, child.pages.size(), parent.length);
  const auto end_of_shared = parent.pages.begin() + num_shared;
  child.pages.insert(child.pages.begin(), parent.pages.begin(), end_of_shared);
  for (std::int64_t i = 0; i < num_shared; ++i) {
    pages_.share(parent.pages[usize(i)]);
  }
  for (std::int64_t i = num_shared; i < num_shared + num_own; ++i) {
    pages_.copy(child.pages[usize(i)], parent.pages[usize(i)]);
  }
  slots_.copy(*child.slot, *parent.slot);
  child.length = parent.length;
  if (tree_.limits().block_tokens > 0) {
    parent.publish_length = child.publish_length = num_shared * page_size();
  }
  if (parent.node) {
    tree_.lock(*parent.node);
    child.node = parent.node;
  }
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
  for (std::int64_t i = 0; i < seq.num_pending; ++i) {
    tree_.drop_checkpoint(seq.pending[usize(i)].slot);
  }
  if (seq.node) {
    tree_.unlock(*seq.node);
    seq.node.reset();
  }
  seq.length = 0;
  seq.checkpoint_at = {};
  seq.num_pending = 0;
  seq.publish_length = 0;
  seq.has_drawn = false;
}

void CacheManager::advance(SeqCache& seq, std::int64_t count) {
  seq.length += count;
  if (!seq.has_drawn) {
    if (std::ranges::find(seq.checkpoint_at, seq.length) != seq.checkpoint_at.end()) {
      copy_state(seq);
    }
    return;
  }
  if (tree_.limits().block_tokens == 0 || seq.length % tree_.limits().block_tokens != 0) {
    return;
  }
  if (seq.num_pending > 0) {
    slots_.copy(seq.pending[0].slot, *seq.slot);
    seq.pending[0].length = seq.publish_length = seq.length;
  } else if (2 * (tree_.num_pending() + 1) <= tree_.limits().num_checkpoints) {
    copy_state(seq);  // at most half of the slots wait for the end of a response
  }
}

void CacheManager::copy_state(SeqCache& seq) {
  if (const std::optional<SlotId> slot = tree_.take_checkpoint(*seq.slot)) {
    seq.pending[usize(seq.num_pending++)] = {*slot, seq.length};
    seq.publish_length = seq.length;
  }
}

void CacheManager::confirm(SeqCache& seq, std::span<const std::int32_t> tokens,
                           const CacheSalt& salt) {
  if (!seq.has_drawn) {
    seq.has_drawn = true;
    publish(seq, tokens, salt);
  }
}

void CacheManager::retire(SeqCache& seq, std::span<const std::int32_t> tokens,
                          const CacheSalt& salt) {
  if (seq.has_drawn) {
    publish(seq, tokens, salt);
  }
  release(seq);
}

void CacheManager::publish(SeqCache& seq, std::span<const std::int32_t> tokens,
                           const CacheSalt& salt) {
  if (seq.publish_length == 0) {
    return;
  }
  TDM_CHECK(seq.publish_length <= seq.length, seq.publish_length, seq.length);
  const NodeId node = tree_.insert(tokens.first(usize(seq.publish_length)), salt, seq.pages);
  if (seq.node) {
    tree_.unlock(*seq.node);
  }
  seq.node = node;
  for (std::int64_t i = 0; i < seq.num_pending; ++i) {
    tree_.attach(node, seq.pending[usize(i)].length, seq.pending[usize(i)].slot);
  }
  seq.num_pending = 0;
  seq.publish_length = 0;
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
  std::vector<NodeId> locked;
  const auto use_slot = [&](SlotId slot) {
    TDM_CHECK(!slot_used[usize(index_of(slot))], index_of(slot));
    slot_used[usize(index_of(slot))] = true;
  };
  std::int64_t num_pending = 0;
  for (const SeqCache* seq : live) {
    TDM_CHECK(seq->slot || (seq->pages.empty() && seq->length == 0), seq->length);
    TDM_CHECK(seq->slot || (!seq->node && seq->num_pending == 0 && !seq->has_drawn));
    TDM_CHECK(pages_for(seq->length) <= isize(seq->pages), seq->length, seq->pages.size());
    for (const PageId page : seq->pages) {
      ++references[usize(index_of(page))];
    }
    if (seq->slot) {
      use_slot(*seq->slot);
    }
    for (std::int64_t i = 0; i < seq->num_pending; ++i) {
      TDM_CHECK(seq->pending[usize(i)].length <= seq->publish_length, seq->publish_length);
      use_slot(seq->pending[usize(i)].slot);
    }
    num_pending += seq->num_pending;
    if (seq->node) {
      TDM_CHECK(tree_.begins_with(seq->pages, *seq->node), index_of(*seq->node));
      locked.push_back(*seq->node);
    }
  }
  TDM_CHECK(num_pending == tree_.num_pending(), num_pending, tree_.num_pending());
  const std::int64_t held =
      std::ranges::count_if(references, [](std::int32_t count) { return count > 0; });
  tree_.check_integrity(references, slot_used, locked);
  for (std::int64_t page = 0; page < pages_.num_pages(); ++page) {
    const PageId id{static_cast<std::int32_t>(page)};
    TDM_CHECK(references[usize(page)] == pages_.refcount(id), page, references[usize(page)],
              pages_.refcount(id));
  }
  TDM_CHECK(held + num_available_pages() == pages_.num_pages(), held, num_available_pages());
  const std::int64_t num_slots = std::ranges::count(slot_used, true);
  TDM_CHECK(num_slots + slots_.num_free() == slots_.num_slots(), num_slots, slots_.num_free());
}

}  // namespace tandem
