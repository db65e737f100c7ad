"""The marks in a row's arrays that stand for neither a document nor a token. Data, attention and loss share them."""

ANCHOR = 0  # in `document_ids`: the anchor, which every document sees
PADDING = -1  # in `document_ids`: sees nothing and is not seen
IGNORED = -100  # in `shift_labels`: no loss is taken; torch's `ignore_index`
