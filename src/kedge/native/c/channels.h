/* Which channels of a view hold a number above zero. */
#ifndef KEDGE_CHANNELS_H
#define KEDGE_CHANNELS_H

#include "view.h"

/* Sets one byte a channel: 1 where one of its numbers is above zero, else 0.
 *
 * `others` is the view of the first channel, `channels` are `stride` numbers apart; `open` is room for as many numbers
 * as there are channels.
 */
void active_channels(const View *others, int64_t channels, int64_t stride, uint8_t *active, int64_t *open);

#endif
