// What a product on quantized weights asks for (prefetches) while it multiplies by a panel (quantized/matmul.h).
#pragma once

#include "quantized/tiles/tile.h"
#if defined(QUIRE_AMX)
#include "quantized/tiles/amx_groups.h"
#endif

namespace quire::QUIRE_ISA {

#if !defined(QUIRE_AMX)
QUIRE_INLINE constexpr bool has_groups_on_tiles(const QuantizedShape&, int64_t) { return false; }
#endif

// The most blocks of rows that share requests, where the nearest cache is large and where it is not: more multiply for
// so long that one of them may as well read. Nothing asks for a task's first piece then, so that tasks are larger.
constexpr int64_t kSharingBlocks = 4, kFewSharingBlocks = 2, kSharingTaskPanels = kAsksNear ? 32 : kTaskPanels;
// The most bytes of a piece for which small tiles share requests: two of them stay in the second-level cache.
constexpr int64_t kMostShared = kIsAvx2 ? 256 * 1024 : 0;

// Whether tiles read integers as they are stored, and unpack those of fewer than 8 bits for each block of rows anew;
// else they are unpacked once for all rows. Unpacking reads in bursts, tiles read all the time: up to a dozen rows that
// makes up for unpacking twice.
static bool is_read_as_stored(const PanelReader& reader, int64_t rows) {
  if (reader.is_plain()) return reader.shape.format.bits == 8 || rows < kFewestUnpackedHalves || !asks_in_line();
  return kUnpacksInRegisters && rows <= kGroupedShape.rows * (W == 16 && asks_in_line() ? 3 : 2) / 2;
}

// Whether the tiles of this product ask as asks_in_line() says. Those of 256 bits do also where integers are unpacked
// first.
static bool asks_in_line(const PanelReader& reader, int64_t rows) {
  const QuantizedShape& shape = reader.shape;
  if (shape.k == 0 || shape.is_whole || has_groups_on_tiles(shape, rows)) return false;
  return asks_in_line() && (kIsAvx2 || is_read_as_stored(reader, rows));
}

// Whether each of several passes through a piece of a panel asks for its share of the next piece, which then comes
// while all rows are multiplied.
static bool shares_requests(const PanelReader& reader, const QuantizedRow& layout, int64_t rows) {
  const TileShape& shape = shape_of(layout, rows);
  const int64_t blocks = ceil_div(rows, shape.rows);
  const bool is_one_pass = blocks == 1 && shape.width(int(rows)) == kVectorsPerPanel;
  if (asks_in_line(reader, rows)) return !is_one_pass;
  if (is_one_pass || !is_read_as_stored(reader, rows)) return false;
  if (kAsksNear) return blocks <= (has_large_nearest_cache() ? kSharingBlocks : kFewSharingBlocks);
  return layout.is_whole && layout.group * kPanelColumns <= kMostShared;
}

// How a product of `rows` rows asks while it multiplies by a panel, piece after piece.
struct Requests {
  bool are_shared;
  Ask ask = Ask::kNext;
  int64_t ahead = kPanelAhead;  // how far behind what is read
  int64_t line_bytes = 0;       // of the panel, fields included, for each block or smaller group; 0: not in line
  int64_t group_bytes = 0;      // the same for each group
  int64_t passed = 0;           // groups that are multiplied until what is asked for in line is read

  QUIRE_MEMBER Requests(const PanelReader& reader, const QuantizedRow& layout, int64_t rows, int64_t piece_groups)
      : are_shared(shares_requests(reader, layout, rows)) {
    const bool has_small_groups = !layout.is_whole;
    if (are_shared) {
      ahead = piece_groups * layout.group / QuantizedShape::kBlock * reader.shape.block_bytes();
    } else if (W == 16 && is_intel() && !has_small_groups) {
      ahead = line_ahead(rows);
    }
    if (kAsksNear && has_large_nearest_cache()) {
      ask = is_intel() ? Ask::kNext : Ask::kNearest;
    } else if (kAsksNear && reader.shape.format.bits == 8) {
      // The processor's own requests stay ahead, the less so the longer each group's scales and mins take in between.
      if (rows <= kUnfetchedRows - has_small_groups - layout.has_mins) ask = Ask::kNot;
    }
    if (ask == Ask::kNot || !asks_in_line(reader, rows)) return;
    ahead = line_ahead(rows);
    line_bytes = reader.shape.panel_bytes() / (layout.groups * layout.blocks);
    group_bytes = layout.blocks * line_bytes;
    passed = are_shared ? piece_groups : 0;
  }

  // Asks for the fields of the panel ahead, unless tiles do so in line: else they skip them, and ask for what lies
  // ahead of the integers.
  QUIRE_MEMBER void ask_for_fields(const PanelReader& reader, const char* panel) const {
    const Ask how = ask == Ask::kNot ? Ask::kNext : ask;
    for (int64_t at = 0; at < reader.integers_at && line_bytes == 0; at += 64) ask_for(how, panel + ahead + at);
  }

  // Has a piece's tiles ask. `integers` are all of the panel's; up to `read` they have been read, and what follows soon
  // after them is asked for already.
  QUIRE_MEMBER void add_to(WeightPiece& piece, const char* integers, const char* read) const {
    piece.ask = ask;
    piece.ahead = ahead + (line_bytes > 0 ? integers + (piece.first + passed) * group_bytes : read) - piece.units;
    piece.line_bytes = line_bytes;
  }
};

}  // namespace quire::QUIRE_ISA
