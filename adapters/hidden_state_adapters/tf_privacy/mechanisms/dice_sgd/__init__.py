"""DiceSGD: what the clip cuts off is kept, unseen, and fed back clipped again."""
