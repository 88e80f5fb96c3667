/* What the kernel of a device is given: C fills it in, and statistics.cu reads it. */
#ifndef KEDGE_WORK_H
#define KEDGE_WORK_H

/* The columns of a row on a device: those of `Totals` without the count, and the seconds that the kernel took. */
#define ROW 8

/* The most rows that parts of a value take, and the bytes that a block of threads reads at a time. */
#define MOST_PARTS 512
#define CHUNK_BYTES 16384

/* The rows that the histogram of a value's drawn numbers takes: 83 counts, and how many are outside, 16 bits each. */
#define DRAWN_ROWS 3

/* Values with more dimensions, when those are joined that can be read as one, are left to others. */
#define DEVICE_DIMS 8

typedef struct {
    const void *numbers;
    long long count;      /* how many numbers there are */
    long long repeats;    /* how often each of them counts */
    double *row;          /* where the statistics go */
    double *parts;        /* a row for each block of threads; not used by a single one */
    unsigned *arrived;    /* how many blocks are done: 0 before and after */
    unsigned short *drawn; /* where the histogram goes; NULL for none */
    unsigned char *active; /* a byte for each channel, set where a number is above zero; NULL for none */
    long long distance;    /* between numbers that are drawn */
    double low, high;      /* drawn numbers that are not above the one, or not below the other, are outside */
    double tick;           /* the seconds between two readings of the card's clock */
    long long inner;       /* how far apart channels are, in numbers */
    int channels;
    int what;       /* a WHAT_ of tensors.h */
    int dims;       /* 0: the numbers lie one after another; else sizes and strides, outermost first */
    long long size[DEVICE_DIMS], stride[DEVICE_DIMS]; /* in numbers */
} Work;

#endif
